"""How the bundled model, its draft head and its hybrid are made and measured: corpus, training, evaluation."""

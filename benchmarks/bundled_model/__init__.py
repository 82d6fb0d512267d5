"""How the bundled model is made and measured: the corpus, the training run, the evaluation."""

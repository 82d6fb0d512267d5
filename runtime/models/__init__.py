"""Models: from a checkpoint's files to a decoder.

`load` reads `config.json` (`read_config`), finds the architecture (`registry`, `families`), reads its tensors
(`weights`) and binds its layers to a kernel set (`decoder`).
"""

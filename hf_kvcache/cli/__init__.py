"""`hf-kvcache`: one command, one file for each of its subcommands. Needs `pip install "hf-kvcache[cli]"`."""

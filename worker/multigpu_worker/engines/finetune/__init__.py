"""The script of training jobs that fine-tune a language model on given texts.

transformers.Trainer trains, on accelerate and peft; here are what comes before and after it: the texts, the choice of a
strategy by measured memory, checkpoints that survive, and the new version in the model repository.
"""

"""Compression of trained models for deployment: ``python -m mpicoll.deploy``.

Quantisation, pruning, distillation and low-rank factors of the trainer's models, an inference runtime in NumPy, export
to ONNX, and reports. :mod:`mpicoll.deploy.model_sources` reads models, :mod:`mpicoll.deploy.inference` runs them.
"""

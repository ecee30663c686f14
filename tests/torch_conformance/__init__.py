"""PyTorch's own tests of ``torch.distributed``, on the backend mpicoll."""

import torch

# Two cores and many processes: one thread each keeps timings even and results reproducible.
torch.set_num_threads(1)

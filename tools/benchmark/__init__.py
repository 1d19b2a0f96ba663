"""What the programs tools/benchmark_*.py are made of."""

"""The benchmarks, in one house: `python -m scripts.bench` lists them; docs/benchmarks.md has what they found."""

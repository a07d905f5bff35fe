"""What a plan promised against what is measured: a step with and without, and memory over the step."""

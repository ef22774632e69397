"""One pipeline stage: plans in, layers run, results out."""

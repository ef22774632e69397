"""A running pipeline: stages, links and coordinator put together, locally or on Ray."""

"""The suites of ``memkv-pp bench``: speed as ratios, after both sides agree."""

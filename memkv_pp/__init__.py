"""memkv-pp: a pipeline-parallel multi-GPU cache orchestrator on Ray.

Not related to MinIO's MemKV. The map of the rooms is ``docs/architecture.md``.
"""

__version__ = "0.1.0"

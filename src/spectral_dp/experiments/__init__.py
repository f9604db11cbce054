"""Training runs, comparisons and the paper's tables: what the command line does, as a library.

- A run: ``settings`` say what to do, ``network`` and ``spectral`` make the model and say what is released of it,
  ``methods`` bring optimizer, sampling and accounting, ``trainer`` is the loop, and ``run_directory`` keeps what it
  leaves behind, among it the privacy ``statement``, ``layer_facts`` and ``figures``.
- Many runs: a ``grid`` of settings and seeds, made by ``processes``, read back by ``recorded_run``, put together by
  ``results``. A ``comparison`` is such a grid from flags, a ``recipe`` one from a file; ``reproduction`` is its report.
- ``report`` is an HTML page about any runs, ``audit_target`` and ``audit_figure`` are for audits.
"""

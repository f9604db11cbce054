"""Training runs, comparisons and the paper's tables: what the command line does, as a library.

- A run: ``settings`` say what to do, ``network`` and ``spectral`` make the model and say what is released of it,
  ``methods`` bring optimizer, sampling and accounting, ``trainer`` is the loop, and ``run_directory`` keeps what it
  leaves behind: among others the privacy ``statement`` (``in_words`` says what it means), the ``model_card``, the
  ``layer_facts`` and the ``figures``. ``diagnostics`` are
  figures of the raw data, which are recorded only if asked for.
- Many runs: a ``grid`` of settings and seeds, made by ``processes``, read back by ``recorded_run``, put together by
  ``results``. A ``comparison`` is such a grid from flags, a ``recipe`` one from a file; ``reproduction`` is its report.
- ``report`` writes an HTML page about any runs, from the template ``report.html``. ``audit_target`` turns settings or a
  run into a target for the audit, and ``audit_figure`` draws what the audit found.
"""

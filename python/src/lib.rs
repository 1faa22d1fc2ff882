//! The Python module sempa_pvm: PVM tasks and master-worker programs.

//! The structures of `sempa_work.h`. The header documents the fields.

use std::ffi::{c_char, c_int, c_void};

/// The structure `sempa_settings` of the header.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    pub(crate) size: usize,
    pub(crate) pause_policy: c_int,
    pub(crate) worker_order: c_int,
    pub(crate) reassign_after_s: f64,
    pub(crate) attempts_max: u32,
    pub(crate) second_copies: c_int,
    pub(crate) retry_delay_s: f64,
    pub(crate) retry_delay_max_s: f64,
    pub(crate) host_exclusion_s: f64,
    pub(crate) look_ahead_s: f64,
    pub(crate) report_interval_s: f64,
    pub(crate) attempt_timeout_s: f64,
    pub(crate) straggler_ratio: f64,
    pub(crate) straggler_age_min_s: f64,
    pub(crate) request_step: u32,
    pub(crate) starting_workers_max: u32,
    pub(crate) request_delay_s: f64,
    pub(crate) request_delay_max_s: f64,
    pub(crate) tasks_max: u64,
    pub(crate) workers_max: u64,
    pub(crate) group_sets_max: u64,
    pub(crate) history_max: u64,
    pub(crate) quarantined_max: u64,
    pub(crate) tasks_per_worker_max: u64,
}

/// The structure `sempa_workers` of the header.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Workers {
    pub(crate) size: usize,
    pub(crate) program: *const c_char,
    pub(crate) arguments: *const *const c_char,
    pub(crate) target: u32,
    pub(crate) place_kind: c_int,
    pub(crate) place: *const c_char,
}

/// The structure `sempa_options` of the header.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    pub(crate) size: usize,
    pub(crate) run_name: *const c_char,
    pub(crate) journal: *const c_char,
    pub(crate) settings: *const Settings,
    pub(crate) workers: *const Workers,
    pub(crate) master_wait_s: f64,
    pub(crate) progress_interval_s: f64,
}

/// The structure `sempa_task` of the header.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Task {
    pub(crate) payload: *const c_void,
    pub(crate) length: usize,
    pub(crate) key: f64,
    pub(crate) groups: u64,
}

/// The structure `sempa_open_task` of the header.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpenTask {
    pub(crate) id: u64,
    pub(crate) payload: *const c_void,
    pub(crate) length: usize,
    pub(crate) key: f64,
    pub(crate) groups: u64,
    pub(crate) is_running: c_int,
}

/// The structure `sempa_result` of the header.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct TaskResult {
    pub(crate) task: u64,
    pub(crate) worker: u64,
    pub(crate) cpu_s: f64,
    pub(crate) wall_s: f64,
    pub(crate) payload: *const c_void,
    pub(crate) payload_length: usize,
    pub(crate) data: *const c_void,
    pub(crate) length: usize,
}

/// The structure `sempa_partial_result` of the header.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct PartialResult {
    pub(crate) task: u64,
    pub(crate) payload: *const c_void,
    pub(crate) payload_length: usize,
    pub(crate) data: *const c_void,
    pub(crate) length: usize,
}

/// The structure `sempa_attempt` of the header.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attempt {
    pub(crate) worker: u64,
    pub(crate) host: *const c_char,
    pub(crate) reason: *const c_char,
    pub(crate) duration_s: f64,
    pub(crate) counts: c_int,
}

/// The structure `sempa_quarantined` of the header.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Quarantined {
    pub(crate) task: u64,
    pub(crate) payload: *const c_void,
    pub(crate) payload_length: usize,
    pub(crate) attempts: *const Attempt,
    pub(crate) attempt_count: usize,
}

/// The structure `sempa_pool_event` of the header.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct PoolEvent {
    pub(crate) kind: c_int,
    pub(crate) cause: c_int,
    pub(crate) worker: u64,
    pub(crate) host: *const c_char,
    pub(crate) reason: *const c_char,
}

/// The structure `sempa_progress` of the header.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Progress {
    pub(crate) size: usize,
    pub(crate) finished: u64,
    pub(crate) running: u64,
    pub(crate) waiting: u64,
    pub(crate) delayed: u64,
    pub(crate) quarantined: u64,
    pub(crate) workers: u64,
    pub(crate) computing_workers: u64,
    pub(crate) remaining_s: f64,
    pub(crate) spread_s: f64,
}

/// The structure `sempa_statistics` of the header.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Statistics {
    pub(crate) size: usize,
    pub(crate) wall_s: f64,
    pub(crate) cpu_s: f64,
    pub(crate) normalized_s: f64,
    pub(crate) pool_performance: f64,
    pub(crate) average_workers: f64,
    pub(crate) average_workers_with_paused: f64,
    pub(crate) efficiency: f64,
    pub(crate) normalized_per_wall: f64,
    pub(crate) working_share: f64,
    pub(crate) factor_mean: f64,
    pub(crate) factor_min: f64,
    pub(crate) factor_max: f64,
    pub(crate) task_cpu_mean_s: f64,
    pub(crate) task_cpu_min_s: f64,
    pub(crate) task_cpu_max_s: f64,
    pub(crate) tasks_added: u64,
    pub(crate) results_accepted: u64,
    pub(crate) results_discarded: u64,
    pub(crate) attempts: u64,
    pub(crate) attempts_lost: u64,
    pub(crate) attempts_failed: u64,
    pub(crate) tasks_pruned: u64,
    pub(crate) tasks_quarantined: u64,
    pub(crate) second_copies: u64,
    pub(crate) tasks_recalled: u64,
    pub(crate) workers_started: u64,
    pub(crate) workers_lost: u64,
    pub(crate) worker_migrations: u64,
    pub(crate) worker_pauses: u64,
}

/// The structure `sempa_outcome` of the header.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outcome {
    pub(crate) size: usize,
    pub(crate) is_finished: c_int,
    pub(crate) generation: u64,
    pub(crate) repeated_results: u64,
    pub(crate) statistics: Statistics,
}

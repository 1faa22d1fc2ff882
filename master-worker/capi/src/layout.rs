//! Compares the structures of the crate with those of the header, which a C compiler knows.

use crate::abi::*;
use crate::ffi;
use std::path::Path;
use std::process::Command;

/// Returns checks of the size and of the fields' positions of a structure, as C code.
macro_rules! layout_checks {
    ($name:literal, $type:ty, $($field:ident)*) => {{
        use std::fmt::Write;
        let mut checks = String::new();
        let size = size_of::<$type>();
        writeln!(checks, "_Static_assert(sizeof({}) == {size}, \"size\");", $name).expect("text");
        $(
            let (field, offset) = (stringify!($field), std::mem::offset_of!($type, $field));
            writeln!(
                checks,
                "_Static_assert(offsetof({}, {field}) == {offset}, \"{field}\");",
                $name
            )
            .expect("text");
        )*
        checks
    }};
}

pub(crate) use layout_checks;

fn option_checks() -> String {
    let settings = layout_checks!("sempa_settings", Settings,
        size pause_policy worker_order reassign_after_s attempts_max second_copies retry_delay_s
        retry_delay_max_s host_exclusion_s look_ahead_s report_interval_s attempt_timeout_s
        straggler_ratio straggler_age_min_s request_step starting_workers_max request_delay_s
        request_delay_max_s tasks_max workers_max group_sets_max history_max quarantined_max
        tasks_per_worker_max);
    let workers = layout_checks!("sempa_workers", Workers,
        size program arguments target place_kind place);
    let options = layout_checks!("sempa_options", Options,
        size run_name journal settings workers master_wait_s progress_interval_s);
    settings + &workers + &options
}

fn task_checks() -> String {
    [
        layout_checks!("sempa_task", Task, payload length key groups),
        layout_checks!("sempa_open_task", OpenTask, id payload length key groups is_running),
        layout_checks!("sempa_result", TaskResult,
            task worker cpu_s wall_s payload payload_length data length),
        layout_checks!("sempa_partial_result", PartialResult,
            task payload payload_length data length),
        layout_checks!("sempa_attempt", Attempt, worker host reason duration_s counts),
        layout_checks!("sempa_quarantined", Quarantined,
            task payload payload_length attempts attempt_count),
        layout_checks!("sempa_pool_event", PoolEvent, kind cause worker host reason),
    ]
    .concat()
}

fn report_checks() -> String {
    let progress = layout_checks!("sempa_progress", Progress,
        size finished running waiting delayed quarantined workers computing_workers remaining_s
        spread_s);
    let statistics = layout_checks!("sempa_statistics", Statistics,
        size wall_s cpu_s normalized_s pool_performance average_workers
        average_workers_with_paused efficiency normalized_per_wall working_share factor_mean
        factor_min factor_max task_cpu_mean_s task_cpu_min_s task_cpu_max_s tasks_added
        results_accepted results_discarded attempts attempts_lost attempts_failed tasks_pruned
        tasks_quarantined second_copies tasks_recalled workers_started workers_lost
        worker_migrations worker_pauses);
    let outcome = layout_checks!("sempa_outcome", Outcome,
        size is_finished generation repeated_results statistics);
    progress + &statistics + &outcome
}

#[test]
fn structures_are_those_of_the_header() {
    let folder = tempfile::tempdir().expect("a folder");
    let source = folder.path().join("layout.c");
    let include = "#include <sempa_work.h>\n".to_string();
    let checks =
        include + &option_checks() + &task_checks() + &report_checks() + &ffi::callback_checks();
    std::fs::write(&source, checks).expect("a file");
    let mut compiler = Command::new("gcc");
    compiler
        .args(["-std=c11", "-fsyntax-only", "-I"])
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("include"))
        .arg(source);
    let output = compiler.output().expect("gcc is installed");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
}

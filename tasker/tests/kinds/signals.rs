//! Tests signals, timers and clocks.

use super::fixture::{
    MigrationFixture, assert_prints_after_migration, assert_survives, start_tasker,
};

/// Signal handlers with their flags, signal masks and the signal stack are kept.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn signal_handlers_masks_and_stack_are_kept() {
    assert_survives("signals", "handlers");
}

/// Blocked and queued signals are delivered once and in order.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn queued_signals_arrive_once_and_in_order() {
    assert_survives("signals", "pending");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_thread_that_waits_for_a_signal_gets_it() {
    assert_survives("signals", "waited-for");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn posix_timers_keep_their_time_left_and_fire() {
    assert_survives("signals", "posix-timers");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn interval_timers_keep_their_time_left_and_fire() {
    assert_survives("signals", "interval-timers");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn an_alarm_keeps_its_time_left_and_fires() {
    assert_survives("signals", "alarms");
}

/// A sleep or poll with a timeout that is interrupted by the migration returns EINTR.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn sleep_with_timeout_ends_with_eintr() {
    assert_survives("signals", "sleepers");
}

/// Monotonic clocks continue from their values at the source, although the target's uptime differs.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn monotonic_clocks_do_not_jump() {
    // The target's uptime is ten days longer than the source's.
    let uptime_wrapper = [
        "unshare",
        "--time",
        "--monotonic",
        "864000",
        "--boottime",
        "864000",
        "--fork",
    ];
    let mut fixture = MigrationFixture::with_target(|_| start_tasker(&uptime_wrapper, &[]));
    let program = fixture.compile_c("signals");
    fixture.start_and_wait_until_ready(&program, &[], "clocks", "");
    fixture.migrate_there_and_back();
    assert_eq!(fixture.assert_ends_successfully(), "ready\nright\n");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_timer_for_one_thread_reaches_that_thread() {
    assert_survives("signals", "thread-timers");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn processor_time_used_counts_anew_inside_the_task() {
    assert_prints_after_migration("signals", "used", "restarted");
}

//! Tests of signals, timers and clocks.

use super::common::Tasker;
use super::scene::{Scene, becomes, survives};

/// Signal handlers, flags, masks and the signal stack are kept.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn signal_handlers_masks_and_stack_are_kept() {
    survives("signals", "handlers");
}

/// Blocked and queued signals arrive once and in order.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn queued_signals_arrive_once_and_in_order() {
    survives("signals", "pending");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_thread_that_waits_for_a_signal_gets_it() {
    survives("signals", "waited-for");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn posix_timers_keep_their_time_left_and_fire() {
    survives("signals", "posix-timers");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn interval_timers_keep_their_time_left_and_fire() {
    survives("signals", "interval-timers");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn an_alarm_keeps_its_time_left_and_fires() {
    survives("signals", "alarms");
}

/// A sleep or poll with a timeout ends early with EINTR.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn sleep_with_timeout_ends_with_eintr() {
    survives("signals", "sleepers");
}

/// Clocks that count from the start of a host do not jump.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn monotonic_clocks_do_not_jump() {
    // The target has an uptime that is ten days longer.
    let longer = [
        "unshare",
        "--time",
        "--monotonic",
        "864000",
        "--boottime",
        "864000",
        "--fork",
    ];
    let mut scene = Scene::begin_with(|_| Tasker::start_by(&longer, &[]));
    let program = scene.compile_c("signals");
    scene.start(&program, &[], "clocks", "");
    scene.moves_there_and_back();
    assert_eq!(scene.ends_right(), "ready\nright\n");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_timer_for_one_thread_reaches_that_thread() {
    survives("signals", "thread-timers");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn processor_time_used_counts_anew_inside_the_task() {
    becomes("signals", "used", "restarted");
}

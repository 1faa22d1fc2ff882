//! Signals, timers and clocks.

use super::common::Tasker;
use super::scene::{Scene, becomes, survives};

#[test]
fn handlers_flags_masks_and_the_signal_stack_are_kept() {
    survives("signals", "handlers");
}

#[test]
fn blocked_and_queued_signals_arrive_once_and_in_order() {
    survives("signals", "pending");
}

#[test]
fn a_thread_that_waits_for_a_signal_gets_it() {
    survives("signals", "waited-for");
}

#[test]
fn posix_timers_keep_their_time_left_and_fire() {
    survives("signals", "posix-timers");
}

#[test]
fn interval_timers_keep_their_time_left_and_fire() {
    survives("signals", "interval-timers");
}

#[test]
fn an_alarm_keeps_its_time_left_and_fires() {
    survives("signals", "alarms");
}

#[test]
fn a_sleep_or_poll_with_a_timeout_ends_early_with_eintr() {
    survives("signals", "sleepers");
}

#[test]
fn clocks_that_count_from_the_start_of_a_host_do_not_jump() {
    // The target is a host that runs for ten days longer.
    let longer = [
        "unshare",
        "--time",
        "--monotonic",
        "864000",
        "--boottime",
        "864000",
        "--fork",
    ];
    let Some(mut scene) = Scene::begin_with(|_| Tasker::start_by(&longer, &[])) else {
        return;
    };
    let program = scene.compile_c("signals");
    assert!(scene.start(&program, &[], "clocks", ""));
    scene.moves_there_and_back();
    assert_eq!(scene.ends_right(), "ready\nright\n");
}

#[test]
fn a_timer_for_one_thread_reaches_that_thread() {
    survives("signals", "thread-timers");
}

#[test]
fn processor_time_used_counts_anew_inside_the_task() {
    becomes("signals", "used", "anew");
}

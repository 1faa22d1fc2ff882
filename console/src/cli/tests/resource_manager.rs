//! Tests of commands that the resource manager answers.

use super::*;
use crate::output::time::format_local;

/// `job kill` requests the kill from the resource manager and waits for the end of the job.
#[test]
fn job_kill_waits_for_end() {
    let mut session = session();
    let outcome = run_line(&mut session, "job kill t40002");
    assert_eq!(
        outcome.text,
        "1500 tasks of job t40002 were asked to end, and have ended, 3 of them by SIGKILL\n"
    );
    assert_eq!((outcome.failed, outcome.errors.len()), (false, 0));
    assert_eq!(outcome.json_values[0]["forced"], 3);
    let partial_outcome = run_line(&mut session, "job kill t40003");
    assert_eq!(
        partial_outcome.errors,
        ["job kill: t40005: its daemon does not answer"]
    );
    assert!(
        !partial_outcome.failed
            && partial_outcome
                .text
                .starts_with("2 tasks of job t40003 were asked to end, and have ended"),
        "{partial_outcome:?}"
    );
}

/// `job kill` cancels the restart of a vacated job.
#[test]
fn job_kill_cancels_vacated_job() {
    let outcome = run_line(&mut session(), "job kill t40009");
    assert!(
        !outcome.failed
            && outcome.text.contains(
                "was vacated to checkpoint c7 and waited for hosts: its restart is cancelled"
            ),
        "{outcome:?}"
    );
    let unknown_job_outcome = run_line(&mut session(), "job kill t4000a");
    assert!(unknown_job_outcome.failed, "{unknown_job_outcome:?}");
}

/// A command about a job, task or host that the resource manager does not know fails with an error.
#[test]
fn unknown_to_rm_is_failure() {
    for (line, expected_error) in [
        (
            "why nohost",
            "why: the resource manager knows nothing of nohost",
        ),
        (
            "job status t40009",
            "job status: the resource manager knows no job of t40009",
        ),
        (
            "job suspend t40009",
            "job suspend: the resource manager knows no job of t40009",
        ),
        (
            "job resume t40009",
            "job resume: the resource manager knows no job of t40009",
        ),
    ] {
        let outcome = run_line(&mut session(), line);
        assert!(
            outcome.failed && outcome.errors[0].starts_with(expected_error),
            "{outcome:?}"
        );
    }
}

/// The resource manager suspends jobs, and the daemon of a task suspends a single task.
#[test]
fn suspend_uses_rm_for_jobs_and_daemon_for_tasks() {
    let mut session = session();
    let outcome = run_line(&mut session, "job suspend t40003");
    let expected_text = "2 tasks of job t40002 are suspended: t40003 t40004\nt40002 is unchanged: no daemon has started it\n";
    assert_eq!(
        (outcome.text.as_str(), outcome.failed),
        (expected_text, false)
    );
    assert_eq!(outcome.json_values[0]["others"][0]["tid"], "t40002");
    let outcome = run_line(&mut session, "job resume t40003");
    assert_eq!(
        outcome.text,
        "2 tasks of job t40002 are resumed: t40003 t40004\n"
    );
    let outcome = run_line(&mut session, "job suspend --task t40003");
    assert_eq!(
        (outcome.text.as_str(), outcome.failed),
        ("t40003 is suspended\n", false)
    );
    let tid = Tid::from_raw(0x40003);
    let requests = session.vm.requests.borrow();
    assert!(
        requests.contains(&Request::Suspend {
            tid,
            suspend: true,
            cause: None
        }),
        "{requests:?}"
    );
}

/// Waiting spawns are listed after the jobs, with their position and reason.
#[test]
fn waiting_spawns_follow_jobs() {
    let outcome = run_line(&mut session(), "job list");
    let since = format_local(Micros(5));
    let line = format!(
        "waiting: 3 of worker for job t40002, user 7, since {since}, number 1 in turn: \
         no host is free: h1: owner present (olga on pts/1)"
    );
    assert_eq!(outcome.text.lines().last(), Some(line.as_str()));
    let waiting_json = &outcome.json_values[0]["waiting"][0];
    assert_eq!(
        (
            &waiting_json["count"],
            &waiting_json["job"],
            &waiting_json["by"]
        ),
        (&3.into(), &"t40002".into(), &"t40003".into())
    );
    assert_eq!(
        (&waiting_json["since_us"], &waiting_json["turn"]),
        (&5.into(), &1.into())
    );
    let outcome = run_line(&mut session(), "job list --user 9");
    assert!(!outcome.text.contains("waiting"), "{}", outcome.text);
    assert_eq!(
        outcome.json_values[0]["waiting"].as_array().map(Vec::len),
        Some(0)
    );
}

#[test]
fn usage_and_jobs_have_text_and_json() {
    let outcome = run_line(&mut session(), "usage");
    assert!(
        outcome
            .text
            .lines()
            .nth(1)
            .is_some_and(|line| line.trim_start().starts_with("7 ")),
        "{}",
        outcome.text
    );
    assert_eq!(outcome.json_values[0]["users"][0]["index"], 1.5);
    let outcome = run_line(&mut session(), "job status t40002");
    assert_eq!(outcome.json_values[0]["tasks"][1]["tid"], "t40003");
    assert!(outcome.text.contains("runs"), "{}", outcome.text);
    assert!(
        outcome.text.contains("suspended by t80001 since "),
        "{}",
        outcome.text
    );
    assert_eq!(outcome.json_values[0]["job"]["suspended"]["since_us"], 5);
    assert_eq!(
        outcome.json_values[0]["tasks"][1]["suspended"]["why"],
        "suspended by t80001"
    );
}

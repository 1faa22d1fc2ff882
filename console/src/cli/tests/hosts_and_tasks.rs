//! Tests of commands on hosts, tasks, the event log and the mailbox.

use super::*;
use crate::output::time::format_local;
use crate::session::job_output::TAG_HOSTS;

#[test]
fn ps_omits_other_hosts_and_console() {
    let mut session = session();
    let commands = |text: String| -> Vec<String> {
        text.lines()
            .skip(1)
            .map(|line| {
                line.trim_end()
                    .rsplit(' ')
                    .next()
                    .unwrap_or_default()
                    .to_string()
            })
            .collect()
    };
    assert_eq!(commands(run_successfully(&mut session, "ps")), ["parent"]);
    assert_eq!(
        commands(run_successfully(&mut session, "ps -a")),
        ["parent", "child"],
        "sorted by host and tid"
    );
    assert_eq!(
        commands(run_successfully(&mut session, "ps -ax")),
        ["-", "parent", "child"]
    );
    assert_eq!(
        commands(run_successfully(&mut session, "ps -nha3")),
        ["child"]
    );
    assert_eq!(
        commands(run_successfully(&mut session, "ps -htc0001")),
        ["child"]
    );
    assert_eq!(
        commands(run_successfully(&mut session, "ps -n.")),
        ["parent"]
    );
    assert_eq!(
        commands(run_successfully(&mut session, "ps -h40009")),
        [""; 0]
    );
    let missing_host_outcome = run_line(&mut session, "ps -h1400001");
    assert_eq!(
        missing_host_outcome.errors,
        ["ps: t1400001 is on no host of the virtual machine; 'conf' lists them"]
    );
    assert!(
        missing_host_outcome.failed && missing_host_outcome.text.is_empty(),
        "PVM shows no table either"
    );
}

#[test]
fn failed_add_shows_reason() {
    let outcome = run_line(&mut session(), "add ha9 'ha8 lo=x'");
    assert!(outcome.failed);
    assert_eq!(outcome.errors, ["add ha8: ssh: no route to it"]);
    assert!(outcome.text.ends_with(
        "                     ha9   240000\n                ha8 lo=x Can't start pvmd\n"
    ));
}

fn is_task_list(request: &Request) -> bool {
    matches!(request, Request::Tasks { .. })
}

/// `kill` skips the console, and `sig` also signals the console.
#[test]
fn only_sig_signals_the_console() {
    let mut session = session();
    assert_eq!(
        run_successfully(&mut session, "kill t40001"),
        "t40001: that's me.\n"
    );
    assert_eq!(run_successfully(&mut session, "kill t40002"), "");
    assert!(
        !session.vm.requests.borrow().iter().any(is_task_list),
        "a running task needs no list of all hosts' tasks"
    );
    assert_eq!(run_successfully(&mut session, "kill -c t40002"), "");
    assert_eq!(run_successfully(&mut session, "sig USR1 t40002 t40001"), "");
    let mut requests = session.vm.requests.take();
    requests.retain(|r| !is_task_list(r) && !matches!(r, Request::TaskStatus { .. }));
    let signal = |tid, signal| Request::Signal {
        tid: Tid::from_raw(tid),
        signal,
    };
    assert_eq!(
        requests,
        [
            signal(0x40002, 15),
            signal(0xc0001, 15),
            signal(0x40002, 10),
            signal(0x40001, 10)
        ]
    );
}

/// `kill` of an ended task ends the processes that it has left behind. Without such processes, the
/// signal is sent, because only the daemon knows why it cannot be.
#[test]
fn kill_ends_leftovers_of_ended_tasks() {
    let mut session = session();
    let tids = [0x40005, 0x40006].map(Tid::from_raw);
    session.vm.exited_tasks.replace(tids.to_vec());
    let mut leftover = task(0x40005, 0, 0, 0, "left");
    leftover.leftover_processes = 2;
    session.vm.leftovers.borrow_mut().push(leftover);
    let outcome = run_line(&mut session, "kill t40005 t40006 t40002");
    assert!(
        outcome.failed && outcome.errors.len() == 1 && outcome.errors[0].starts_with("t40006: "),
        "{outcome:?}"
    );
    let mut requests = session.vm.requests.take();
    let list_count = requests.iter().filter(|r| is_task_list(r)).count();
    assert_eq!(list_count, 1, "{requests:?}");
    requests.retain(|r| !is_task_list(r) && !matches!(r, Request::TaskStatus { .. }));
    let signal = |tid| Request::Signal {
        tid: Tid::from_raw(tid),
        signal: 15,
    };
    assert_eq!(
        requests,
        [Request::KillLeftovers { tid: tids[0] }, signal(0x40002)]
    );
}

#[test]
fn status_tables_show_errors() {
    let mut session = session();
    let outcome = run_line(&mut session, "mstat ha2 nohost");
    assert!(outcome.failed);
    assert_eq!(
        outcome.text,
        "                     ha2  ok\n                  nohost  No such host\n"
    );
    assert_eq!(
        run_line(&mut session, "pstat zz").text,
        "t       0  Bad parameter\n"
    );
    assert_eq!(
        run_successfully(&mut session, "pstat t40002"),
        "t   40002  run\n"
    );
}

#[test]
fn failed_delete_shows_reason() {
    let outcome = run_line(&mut session(), "delete ha2 nohost");
    assert!(outcome.failed && outcome.text.starts_with("1 successful\n"));
    assert_eq!(
        outcome.errors,
        ["delete nohost: there is no such host in the virtual machine; 'conf' lists them"]
    );
    let local_outcome = run_line(&mut session(), "delete .");
    assert!(
        local_outcome
            .text
            .ends_with("                       .  Bad parameter\n"),
        "this host is the master: {}",
        local_outcome.text
    );
}

/// The console announces a host that another task has added, only once. It does not announce hosts
/// that it has added itself, or that belonged to the virtual machine when the console joined.
#[test]
fn foreign_hosts_are_announced_once() {
    let mut session = session();
    run_successfully(&mut session, "add ha9");
    let hosts_added_message = |tid: i32| output_message(TAG_HOSTS, 1, &[tid], b"");
    assert_eq!(
        handle_message(&mut session, &hosts_added_message(9 << 18)),
        b"",
        "this console added it itself"
    );
    let announcement =
        String::from_utf8(handle_message(&mut session, &hosts_added_message(2 << 18)))
            .expect("text");
    assert!(
        announcement.starts_with("\nConsole: 1 new host added\n"),
        "{announcement}"
    );
    assert!(announcement.contains("ha2    80000"));
    assert_eq!(
        handle_message(&mut session, &hosts_added_message(2 << 18)),
        b""
    );
    assert!(as_session(&mut session).register_interactive().is_ok());
    assert_eq!(
        handle_message(&mut session, &hosts_added_message(3 << 18)),
        b"",
        "it was there when the console came"
    );
}

/// `can-migrate` lists the hosts that accept a task, and why the other hosts refuse it.
#[test]
fn can_migrate_lists_hosts_and_refusals() {
    let mut session = session();
    let all_hosts_outcome = run_line(&mut session, "can-migrate t40002");
    let expected = "t40002 is on ha1, 4097 KiB\n\
                    ha2  no: /data: it does not exist on the target\n         \
                    it needs 9 bytes of memory, the target has 8\n\
                    ha3  yes\n\
                    nearest host that accepts it: ha3\n";
    assert_eq!(
        (
            String::from_utf8(all_hosts_outcome.text.into()).as_deref(),
            all_hosts_outcome.failed
        ),
        (Ok(expected), false)
    );
    assert_eq!(all_hosts_outcome.json_values[0]["nearest"], "ha3");
    assert_eq!(
        all_hosts_outcome.json_values[0]["hosts"][0]["reasons"][1],
        "it needs 9 bytes of memory, the target has 8"
    );
    let one_host_outcome = run_line(&mut session, "can-migrate t40002 ha2");
    assert!(
        one_host_outcome.failed
            && String::from_utf8(one_host_outcome.text.into())
                .is_ok_and(|text| text.ends_with("no host accepts it\n"))
    );
    let unknown_task_outcome = run_line(&mut session, "can-migrate tc0001");
    assert_eq!(
        unknown_task_outcome.errors,
        ["can-migrate: tc0001 cannot move: it has an io_uring ring"]
    );
}

/// `migrate` reports the bytes and the freeze time of a migration, or the step that failed.
#[test]
fn migrate_reports_cost_or_failed_step() {
    let mut session = session();
    assert_eq!(
        run_successfully(&mut session, "migrate t40002 ha2"),
        "t40002 migrated to ha2: 4096 bytes, frozen 98 ms\n"
    );
    let failed_outcome = run_line(&mut session, "migrate t40002 ha3");
    assert_eq!(
        failed_outcome.errors,
        ["t40002 was not migrated to ha3: dump failed: the engine was killed by signal 9"]
    );
    assert_eq!(failed_outcome.json_values[0]["step"], "dump");
    let refused_outcome = run_line(&mut session, "migrate t40002 hx");
    assert_eq!(
        refused_outcome.errors,
        ["t40002 was not migrated to hx: moving t40002: no host hx"]
    );
    assert!(refused_outcome.failed && refused_outcome.json_values[0]["step"].is_null());
}

/// If the virtual machine ends during a migration, the error does not claim that the migration
/// failed.
#[test]
fn migration_cut_off_by_halt_is_not_failed() {
    let outcome = run_line(&mut session(), "migrate t40002 gone");
    assert_eq!(
        outcome.errors,
        ["the virtual machine ended before t40002 was on gone: the daemon is gone"]
    );
}

#[test]
fn log_is_fetched_in_batches() {
    let mut session = session();
    let log_text = run_successfully(&mut session, "events --from 1");
    assert_eq!(log_text.lines().count(), 4);
    assert!(
        log_text.starts_with(&format!("{} ha1 number 1\n", format_local(Micros(1)))),
        "{log_text}"
    );
    assert!(run_line(&mut session, "events --follow").failed);
}

/// `reset info` removes all entries without an owner, only those of one class, or a single entry.
#[test]
fn mailbox_reset_selects_entries() {
    let mut session = session();
    for line in ["reset", "reset info", "reset info svc", "reset info svc 3"] {
        assert_eq!(run_successfully(&mut session, line), "");
    }
    let reset_request = |name: &str, index| {
        Request::Mailbox(MailboxRequest::Clean {
            name: name.into(),
            index,
        })
    };
    let requests = session.vm.requests.borrow();
    let expected_requests = [
        Request::Reset { kill_tasks: true },
        reset_request("", None),
        reset_request("svc", None),
        reset_request("svc", Some(3)),
    ];
    assert_eq!(requests.as_slice(), expected_requests);
}

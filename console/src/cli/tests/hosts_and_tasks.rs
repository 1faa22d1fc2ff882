//! Tests of commands on hosts, tasks, the event log and the mailbox.

use super::*;
use crate::session::job_output::TAG_HOSTS;

/// `ps` shows only this host, and the console only on request.
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
    assert_eq!(commands(run_ok(&mut session, "ps")), ["parent"]);
    assert_eq!(
        commands(run_ok(&mut session, "ps -a")),
        ["parent", "child"],
        "sorted by host and tid"
    );
    assert_eq!(
        commands(run_ok(&mut session, "ps -ax")),
        ["-", "parent", "child"]
    );
    assert_eq!(commands(run_ok(&mut session, "ps -nha3")), ["child"]);
    assert_eq!(commands(run_ok(&mut session, "ps -htc0001")), ["child"]);
    assert_eq!(commands(run_ok(&mut session, "ps -n.")), ["parent"]);
    assert_eq!(commands(run_ok(&mut session, "ps -h40009")), [""; 0]);
    let nowhere = run_line(&mut session, "ps -h1400001");
    assert_eq!(
        nowhere.errors,
        ["ps: t1400001 is on no host of the virtual machine; 'conf' lists them"]
    );
    assert!(
        nowhere.failed && nowhere.text.is_empty(),
        "PVM shows no table either"
    );
}

/// A host that could not be added is shown with the reason.
#[test]
fn failed_add_shows_reason() {
    let outcome = run_line(&mut session(), "add ha9 'ha8 lo=x'");
    assert!(outcome.failed);
    assert_eq!(outcome.errors, ["add ha8: ssh: no route to it"]);
    assert!(outcome.text.ends_with(
        "                     ha9   240000\n                ha8 lo=x Can't start pvmd\n"
    ));
}

/// Signals go to the named tasks; only `sig` sends one to the console itself.
#[test]
fn only_sig_signals_the_console() {
    let mut session = session();
    assert_eq!(run_ok(&mut session, "kill t40001"), "t40001: that's me.\n");
    assert_eq!(run_ok(&mut session, "kill t40002"), "");
    assert_eq!(run_ok(&mut session, "kill -c t40002"), "");
    assert_eq!(run_ok(&mut session, "sig USR1 t40002 t40001"), "");
    let sent: Vec<_> = session.vm.requests.borrow().iter().cloned().collect();
    let signal = |tid, signal| Request::Signal {
        tid: Tid::from_raw(tid),
        signal,
    };
    assert_eq!(
        sent,
        [
            signal(0x40002, 15),
            signal(0xc0001, 15),
            signal(0x40002, 10),
            signal(0x40001, 10)
        ]
    );
}

/// `mstat` and `pstat` show errors for hosts and tasks that do not exist.
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
    assert_eq!(run_ok(&mut session, "pstat t40002"), "t   40002  run\n");
}

/// A host that could not be deleted is shown with the reason.
#[test]
fn failed_delete_shows_reason() {
    let outcome = run_line(&mut session(), "delete ha2 nohost");
    assert!(outcome.failed && outcome.text.starts_with("1 successful\n"));
    assert_eq!(
        outcome.errors,
        ["delete nohost: there is no such host in the virtual machine; 'conf' lists them"]
    );
    let here = run_line(&mut session(), "delete .");
    assert!(
        here.text
            .ends_with("                       .  Bad parameter\n"),
        "this host is the master: {}",
        here.text
    );
}

/// Hosts that others add are announced once.
#[test]
fn foreign_hosts_are_announced_once() {
    let mut session = session();
    run_ok(&mut session, "add ha9");
    let added = |tid: i32| output_message(TAG_HOSTS, 1, &[tid], b"");
    assert_eq!(
        handle_message(&mut session, &added(9 << 18)),
        b"",
        "this console added it itself"
    );
    let announced = String::from_utf8(handle_message(&mut session, &added(2 << 18))).expect("text");
    assert!(
        announced.starts_with("\nConsole: 1 new host added\n"),
        "{announced}"
    );
    assert!(announced.contains("ha2    80000"));
    assert_eq!(handle_message(&mut session, &added(2 << 18)), b"");
    assert!(as_session(&mut session).register_interactive().is_ok());
    assert_eq!(
        handle_message(&mut session, &added(3 << 18)),
        b"",
        "it was there when the console came"
    );
}

/// `can-migrate` lists the hosts that accept a task, and why the other hosts refuse it.
#[test]
fn can_migrate_lists_hosts_and_refusals() {
    let mut session = session();
    let all = run_line(&mut session, "can-migrate t40002");
    let expected = "t40002 is on ha1, 4097 KiB\n\
                    ha2  no: /data: it does not exist on the target\n         \
                    it needs 9 bytes of memory, the target has 8\n\
                    ha3  yes\n\
                    nearest host that accepts it: ha3\n";
    assert_eq!(
        (String::from_utf8(all.text.into()).as_deref(), all.failed),
        (Ok(expected), false)
    );
    assert_eq!(all.json[0]["nearest"], "ha3");
    assert_eq!(
        all.json[0]["hosts"][0]["reasons"][1],
        "it needs 9 bytes of memory, the target has 8"
    );
    let one = run_line(&mut session, "can-migrate t40002 ha2");
    assert!(
        one.failed
            && String::from_utf8(one.text.into())
                .is_ok_and(|text| text.ends_with("no host accepts it\n"))
    );
    let none = run_line(&mut session, "can-migrate tc0001");
    assert_eq!(
        none.errors,
        ["can-migrate: tc0001 cannot move: it has an io_uring ring"]
    );
}

/// `migrate` reports the bytes and the freeze time of a migration, or the step that failed.
#[test]
fn migrate_reports_cost_or_failed_step() {
    let mut session = session();
    assert_eq!(
        run_ok(&mut session, "migrate t40002 ha2"),
        "t40002 migrated to ha2: 4096 bytes, frozen 98 ms\n"
    );
    let failed = run_line(&mut session, "migrate t40002 ha3");
    assert_eq!(
        failed.errors,
        ["t40002 was not migrated to ha3: dump failed: the engine was killed by signal 9"]
    );
    assert_eq!(failed.json[0]["step"], "dump");
    let refused = run_line(&mut session, "migrate t40002 hx");
    assert_eq!(
        refused.errors,
        ["t40002 was not migrated to hx: moving t40002: no host hx"]
    );
    assert!(refused.failed && refused.json[0]["step"].is_null());
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

/// The whole log is fetched in batches.
#[test]
fn log_is_fetched_in_batches() {
    let mut session = session();
    let shown = run_ok(&mut session, "events --from 1");
    assert_eq!(shown.lines().count(), 4);
    assert!(
        shown.starts_with("1970-01-01T00:00:00.000Z ha1 number 1\n"),
        "{shown}"
    );
    assert!(run_line(&mut session, "events --follow").failed);
}

/// `reset info` removes all entries without an owner, those of a class, or one.
#[test]
fn mailbox_reset_selects_entries() {
    let mut session = session();
    for line in ["reset", "reset info", "reset info svc", "reset info svc 3"] {
        assert_eq!(run_ok(&mut session, line), "");
    }
    let clean = |name: &str, index| {
        Request::Mailbox(MailboxRequest::Clean {
            name: name.into(),
            index,
        })
    };
    let asked = session.vm.requests.borrow();
    let wanted = [
        Request::Reset { kill: true },
        clean("", None),
        clean("svc", None),
        clean("svc", Some(3)),
    ];
    assert_eq!(asked.as_slice(), wanted);
}

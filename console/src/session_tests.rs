//! Tests of commands against a virtual machine that answers from tables.

use super::*;
use crate::collect::{TAG_CLOSE_JOB, TAG_TRACES};
use crate::format::tests::{host, table, task};
use bytes::Bytes;
use libpvm::Vm;
use libpvm::spawn::TC_SIBLINGS;
use sempa_proto::engine::Engine;
use sempa_proto::event::{Event, EventKind};
use sempa_proto::message::CTX_TASK_CONTROL;
use sempa_proto::migration::{Failure, MigrationTargets, Refusal, Step};
use sempa_proto::rm::{
    JobUsage, RmQuery, RmReply, SuspensionInfo, TaskOutcome, TaskUsage, UsageTotals, UserUsage,
    WaitingSpawn,
};
use sempa_proto::table::{AddedHost, HostTable, TaskInfo};
use sempa_proto::task::Sink;
use sempa_proto::task::{MailboxClass, MigrationError, MigrationReport, Reply, SpawnRequest};
use sempa_proto::{Micros, MigrationId};
use std::cell::RefCell;

const CONSOLE: Tid = Tid::from_raw(0x40001);

/// Answers from tables and records the requests.
#[derive(Default)]
struct FakeVm {
    requests: RefCell<Vec<Request>>,
    spawned: RefCell<Vec<SpawnRequest>>,
    sent: RefCell<Vec<Message>>,
}

fn suspended() -> SuspensionInfo {
    SuspensionInfo {
        since: Micros(5),
        cause: sempa_proto::suspend::SuspendCause::JobRequested {
            requested_by: Tid::from_raw(0x80001),
        },
    }
}

fn waiting_spawn() -> WaitingSpawn {
    let (program, why) = (
        "worker".into(),
        "no host is free: h1: owner present (olga on pts/1)".into(),
    );
    let (by, job) = (Tid::from_raw(0x40003), Tid::from_raw(0x40002));
    WaitingSpawn {
        program,
        count: 3,
        requested_by: by,
        job,
        user: 7,
        since: Micros(5),
        queue_position: 1,
        why,
    }
}

impl VirtualMachine for FakeVm {
    fn tid(&self) -> Tid {
        CONSOLE
    }

    fn local_host(&self) -> HostId {
        HostId::MASTER
    }

    fn hosts(&self) -> Result<HostTable, Error> {
        Ok(table())
    }

    fn tasks(&self, selector: Tid) -> Result<Vec<TaskInfo>, Error> {
        let all = [
            task(0xc0001, 0x40002, 12, 6, "child"),
            task(0x40001, 0, 10, 4, ""),
            task(0x40002, -35, 11, 6, "parent"),
        ];
        let wanted = |task: &TaskInfo| {
            selector == Tid::NONE || task.host.tid() == selector || task.tid == selector
        };
        Ok(all.into_iter().filter(wanted).collect())
    }

    fn spawn(&self, request: SpawnRequest) -> Result<Vec<Result<Tid, PvmError>>, Error> {
        let found = request.file != "nofile";
        self.spawned.borrow_mut().push(request);
        Ok(vec![if found {
            Ok(Tid::from_raw(0x80001))
        } else {
            Err(PvmError::NoFile)
        }])
    }

    fn add(&self, lines: &[String]) -> Result<Vec<AddedHost>, Error> {
        let one = |line: &String| match line.as_str() {
            "ha9" => AddedHost {
                result: Ok(host(9, "ha9")),
                reason: String::new(),
            },
            _ => AddedHost {
                result: Err(PvmError::CantStart),
                reason: "ssh: no route to it".into(),
            },
        };
        Ok(lines.iter().map(one).collect())
    }

    fn delete(&self, names: &[String]) -> Result<Vec<Result<(), PvmError>>, Error> {
        let one = |name: &String| match name.as_str() {
            "nohost" => Err(PvmError::NoHost),
            "ha1" => Err(PvmError::BadParam),
            _ => Ok(()),
        };
        Ok(names.iter().map(one).collect())
    }

    fn can_migrate(&self, tid: Tid, to: Option<&str>) -> Result<MigrationTargets, Error> {
        if tid.raw() != 0x40002 {
            let refusal = Refusal::UnsupportedResource {
                what: "an io_uring ring".into(),
            };
            return Err(Error::new(
                PvmError::Denied,
                format!("{tid} cannot migrate: {refusal}"),
            ));
        }
        let file = Refusal::File {
            path: "/data".into(),
            why: "it does not exist on the target".into(),
        };
        let memory = Refusal::Memory { need: 9, have: 8 };
        let host = |n| HostId::new(n).expect("an index");
        let mut verdicts = vec![(host(2), vec![file, memory]), (host(3), Vec::new())];
        verdicts.truncate(if to.is_some() { 1 } else { 2 });
        Ok(MigrationTargets {
            tid,
            from: HostId::MASTER,
            resident_bytes: (4 << 20) + 1,
            verdicts,
            engines: Vec::new(),
        })
    }

    fn migrate(&self, tid: Tid, to: &str) -> Result<MigrationReport, MigrateError> {
        match to {
            "ha2" => Ok(MigrationReport {
                id: MigrationId(1),
                bytes: 4096,
                frozen: Micros(98_000),
                engine: Engine::Criu,
            }),
            "ha3" => Err(MigrationError {
                step: Step::Dump,
                why: Failure::Killed { signal: 9 },
            }
            .into()),
            "gone" => Err(Error::new(PvmError::SysErr, "the daemon is gone").into()),
            _ => Err(Error::new(PvmError::NoHost, format!("moving {tid}: no host {to}")).into()),
        }
    }

    fn events(&self, from: u64, _limit: u32) -> Result<Vec<Event>, Error> {
        let event = |number| Event {
            number,
            at: Micros(number),
            host: HostId::MASTER,
            kind: EventKind::Note {
                text: format!("number {number}"),
            },
        };
        // Two events per request, five in total.
        Ok((from..5).take(2).map(event).collect())
    }

    fn send(&self, message: Message) -> Result<(), Error> {
        self.sent.borrow_mut().push(message);
        Ok(())
    }

    fn ask_rm(&self, question: &RmQuery) -> Result<RmReply, Error> {
        Ok(match question {
            RmQuery::Job(tid) if tid.raw() == 0x40002 => {
                let used = |n: i32| TaskUsage {
                    tid: Tid::from_raw(0x40002 + n),
                    job: *tid,
                    user: 7,
                    program: "worker".into(),
                    host: "ha1".into(),
                    started: Micros(0),
                    ended: (n == 3).then_some((Micros(5), TaskOutcome::Status(0x300))),
                    used: sempa_proto::migration::Usage::default(),
                    migrations: 0,
                    evictions: 0,
                    counts_toward_limits: true,
                    suspended: (n == 1).then(suspended),
                    suspended_total: Micros(0),
                };
                let tasks = (0..=1).map(used).collect();
                let (sums, program) = (UsageTotals::default(), "master".into());
                let (began, suspended) = (Micros(0), Some(suspended()));
                RmReply::Job {
                    job: JobUsage {
                        job: *tid,
                        user: 7,
                        program,
                        started: began,
                        ended: None,
                        totals: sums,
                        suspended,
                    },
                    tasks,
                }
            }
            RmQuery::Suspend { job, suspend } if job.raw() == 0x40003 => {
                let tid = |n: i32| Tid::from_raw(0x40002 + n);
                let others = if *suspend {
                    vec![(tid(0), "no daemon has started it".to_string())]
                } else {
                    vec![]
                };
                RmReply::Suspended {
                    job: tid(0),
                    tasks: vec![tid(1), tid(2)],
                    unchanged: others,
                }
            }
            RmQuery::Kill(job) | RmQuery::KillStatus(job) if job.raw() == 0x40002 => {
                let left = if matches!(question, RmQuery::Kill(_)) {
                    2
                } else {
                    0
                };
                RmReply::KillProgress {
                    job: *job,
                    asked: 1500,
                    forced: 3,
                    left,
                    failed: Vec::new(),
                }
            }
            RmQuery::Kill(job) if job.raw() == 0x40003 => {
                let failed = vec![(
                    Tid::from_raw(0x40005),
                    "its daemon does not answer".to_string(),
                )];
                RmReply::KillProgress {
                    job: *job,
                    asked: 2,
                    forced: 0,
                    left: 0,
                    failed,
                }
            }
            RmQuery::CancelVacated(tid) if tid.raw() == 0x40009 => RmReply::VacatedCancelled {
                job: *tid,
                checkpoint: "c7".into(),
                starting: false,
            },
            RmQuery::Users { .. } => RmReply::Users(vec![UserUsage {
                user: 7,
                totals: UsageTotals::default(),
                index: 1.5,
            }]),
            RmQuery::Jobs { .. } => RmReply::Jobs(Vec::new()),
            RmQuery::WaitingSpawns { user } => RmReply::WaitingSpawns(match user {
                Some(9) => Vec::new(),
                _ => vec![waiting_spawn()],
            }),
            _ => RmReply::NotFound,
        })
    }

    fn ask(&self, request: Request) -> Result<Reply, Error> {
        let reply = match &request {
            Request::HostStatus { name } if name == "nohost" => Err(PvmError::NoHost.into()),
            Request::TaskStatus { tid } if !tid.is_task() => Err(PvmError::BadParam.into()),
            Request::Mailbox(MailboxRequest::List { .. }) => {
                Ok(Reply::MailboxClasses(vec![MailboxClass {
                    name: "svc".into(),
                    entries: vec![(0, CONSOLE, 0)],
                }]))
            }
            Request::Mailbox(MailboxRequest::Put { .. }) => Ok(Reply::MailboxIndex(0)),
            Request::DebugQuery(_) => Ok(Reply::Numbers(vec![3])),
            _ => Ok(Reply::Done),
        };
        self.requests.borrow_mut().push(request);
        reply
    }
}

fn session() -> Session<FakeVm> {
    let env = [("HOME", "/h"), ("COLOUR", "red")]
        .map(|(name, value)| (name.to_string(), value.to_string()));
    Session::new(FakeVm::default(), env.into_iter().collect())
}

fn run_ok(session: &mut Session<FakeVm>, line: &str) -> String {
    let outcome = session.run_line(line);
    assert!(!outcome.failed, "{line}: {outcome:?}");
    outcome.text
}

fn output_message(tag: i32, tid: i32, words: &[i32], bytes: &[u8]) -> Message {
    let mut body = Packer::new(Encoding::Xdr);
    body.int(tid).items(words.iter().copied()).bytes(bytes);
    let src = HostId::MASTER.daemon_tid();
    Message {
        src,
        dst: CONSOLE,
        ctx: CTX_BASE,
        tag,
        wid: 0,
        enc: ENC_XDR,
        body: body.finish(),
    }
}

/// Empty lines, comments and wrong commands do nothing.
#[test]
fn empty_lines_and_errors_do_nothing() {
    let mut session = session();
    assert_eq!(session.run_line(""), Outcome::default());
    assert_eq!(session.run_line("  # all of it"), Outcome::default());
    for (line, refusal) in [
        ("foo", "foo: not found"),
        ("kill", "kill: wrong #args"),
        ("echo \"x", "unmatched \""),
        ("help foo", "foo: not found"),
        ("ps -nnohost", "unknown host nohost"),
        ("setopt foo 1", "PVM Option \"foo\" Unknown."),
    ] {
        let outcome = session.run_line(line);
        assert_eq!(outcome.refusal.as_deref(), Some(refusal), "{line}");
        assert!(outcome.failed && outcome.text.is_empty(), "{line}");
    }
}

/// Aliases add words, and a loop of aliases is refused.
#[test]
fn alias_loop_is_refused() {
    let mut session = session();
    run_ok(&mut session, "alias x echo 1 2");
    assert_eq!(run_ok(&mut session, "x 3"), "1 2 3\n");
    assert_eq!(run_ok(&mut session, "alias"), "x\techo 1 2\n");
    run_ok(&mut session, "alias a b");
    run_ok(&mut session, "alias b a");
    assert_eq!(session.run_line("a").refusal.as_deref(), Some("alias loop"));
    run_ok(&mut session, "alias ps ps -a");
    assert_eq!(
        run_ok(&mut session, "ps").lines().count(),
        3,
        "an alias may widen the command whose name it has"
    );
    run_ok(&mut session, "unalias x a b ps unknown");
    assert_eq!(run_ok(&mut session, "alias"), "");
}

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
    let nowhere = session.run_line("ps -h1400001");
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
    let outcome = session().run_line("add ha9 'ha8 lo=x'");
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

/// The status commands show what does not exist.
#[test]
fn status_tables_show_errors() {
    let mut session = session();
    let outcome = session.run_line("mstat ha2 nohost");
    assert!(outcome.failed);
    assert_eq!(
        outcome.text,
        "                     ha2  ok\n                  nohost  No such host\n"
    );
    assert_eq!(
        session.run_line("pstat zz").text,
        "t       0  Bad parameter\n"
    );
    assert_eq!(run_ok(&mut session, "pstat t40002"), "t   40002  run\n");
}

/// Exported variables are in the environment of spawned tasks.
#[test]
fn exported_variables_reach_spawned_tasks() {
    let mut session = session();
    assert_eq!(run_ok(&mut session, "export"), "PVM_EXPORT=\n");
    run_ok(&mut session, "export COLOUR MISSING COLOUR");
    assert_eq!(
        run_ok(&mut session, "export"),
        "PVM_EXPORT=COLOUR:MISSING\n"
    );
    run_ok(&mut session, "setenv COLOUR blue");
    assert_eq!(run_ok(&mut session, "setenv COLOUR"), "blue\n");
    run_ok(&mut session, "spawn hello -v");
    run_ok(&mut session, "unexport COLOUR");
    assert_eq!(run_ok(&mut session, "export"), "PVM_EXPORT=MISSING\n");
    let spawned = session.vm.spawned.borrow();
    let env: Vec<&[u8]> = spawned[0].env.iter().map(Vec::as_slice).collect();
    assert_eq!(env, [&b"PVM_EXPORT=COLOUR:MISSING"[..], b"COLOUR=blue"]);
    assert_eq!(spawned[0].args, [b"-v"]);
    assert_eq!(spawned[0].output, Sink::default());
}

/// Output of a job is shown until the job has finished.
#[test]
fn job_output_is_shown_until_end() {
    let mut session = session();
    assert_eq!(
        run_ok(&mut session, "spawn -> hello"),
        "[1]\n1 successful\nt80001\n"
    );
    let sink = session.vm.spawned.borrow()[0].output;
    assert_eq!(sink.tid, CONSOLE);
    assert_eq!(run_ok(&mut session, "jobs"), " 1: t80001\n");
    let shown = |session: &mut Session<FakeVm>, words: &[i32], bytes: &[u8]| {
        let shown = session.handle_message(&output_message(sink.tag, 0x80001, words, bytes));
        String::from_utf8(shown).expect("text")
    };
    assert_eq!(shown(&mut session, &[-1, 0], b""), "");
    assert_eq!(shown(&mut session, &[6], b"hello\n"), "[1:t80001] hello\n");
    assert_eq!(
        shown(&mut session, &[0], b""),
        "[1:t80001] EOF\n[1] finished\n"
    );
    assert!(!session.has_jobs());
    assert_eq!(run_ok(&mut session, "jobs"), "");
}

/// Output can go to a file, and an existing file is not overwritten.
#[test]
fn output_file_is_never_overwritten() {
    let path = std::env::temp_dir().join(format!("pvm-console-job-{}", std::process::id()));
    let _ = std::fs::remove_file(&path);
    let path_text = path.display().to_string();
    let mut session = session();
    assert_eq!(
        run_ok(&mut session, &format!("spawn ->{path_text} hello")),
        "[1]\n1 successful\nt80001\n"
    );
    let tag = session.vm.spawned.borrow()[0].output.tag;
    assert_eq!(
        session.handle_message(&output_message(tag, 0x80001, &[3], b"abc")),
        b""
    );
    assert_eq!(
        session.handle_message(&output_message(tag, 0x80001, &[0], b"")),
        b"[1] finished\n"
    );
    assert_eq!(
        std::fs::read_to_string(&path).expect("written"),
        "[1:t80001] abc\n[1:t80001] EOF\n"
    );
    let again = session.run_line(&format!("spawn ->{path_text} hello"));
    assert_eq!(again.refusal, Some(format!("{path_text}: File exists")));
    run_ok(&mut session, &format!("spawn ->>{path_text} hello"));
    std::fs::remove_file(&path).expect("ours");
}

/// The error about a missing program says what to do.
#[test]
fn missing_program_error_gives_advice() {
    let mut session = session();
    let outcome = session.run_line("spawn -> nofile");
    assert_eq!(outcome.text, "[1]\n0 successful\nNo such file\n");
    assert!(outcome.failed && !session.has_jobs());
    assert_eq!(outcome.errors.len(), 1);
    assert!(outcome.errors[0].starts_with("spawn nofile: it is not in the search path"));
    let debugged = session.run_line("spawn -? nofile");
    assert!(debugged.errors[0].starts_with("spawn nofile: the program, or the debugger"));
    let unwritable = session.run_line("spawn ->/nonexistent/file hello").refusal;
    assert_eq!(
        unwritable.as_deref(),
        Some("/nonexistent/file: No such file or directory")
    );
}

/// Spawned tasks receive the tids of their siblings.
#[test]
fn spawned_tasks_receive_siblings() {
    let mut session = session();
    run_ok(&mut session, "spawn hello");
    let sent = session.vm.sent.borrow();
    assert_eq!(sent.len(), 1);
    assert_eq!(
        (sent[0].dst, sent[0].ctx, sent[0].tag),
        (Tid::from_raw(0x80001), CTX_TASK_CONTROL, TC_SIBLINGS)
    );
    let mut body = Vm::unpack(&sent[0]).expect("readable");
    assert_eq!((body.int(), body.int()), (Ok(1), Ok(0x80001)));
}

/// A host that could not be deleted is shown with the reason.
#[test]
fn failed_delete_shows_reason() {
    let outcome = session().run_line("delete ha2 nohost");
    assert!(outcome.failed && outcome.text.starts_with("1 successful\n"));
    assert_eq!(
        outcome.errors,
        ["delete nohost: there is no such host in the virtual machine; 'conf' lists them"]
    );
    let here = session().run_line("delete .");
    assert!(
        here.text
            .ends_with("                       .  Bad parameter\n"),
        "this host is the master: {}",
        here.text
    );
}

/// Messages of other tasks are not mistaken for output.
#[test]
fn forged_output_is_ignored() {
    let mut session = session();
    run_ok(&mut session, "spawn -> hello");
    let tag = session.vm.spawned.borrow()[0].output.tag;
    let forged = Message {
        src: Tid::from_raw(0x40002),
        ..output_message(tag, 0x80001, &[6], b"forged")
    };
    assert_eq!(session.handle_message(&forged), b"");
}

/// Hosts that others add are announced once.
#[test]
fn foreign_hosts_are_announced_once() {
    let mut session = session();
    run_ok(&mut session, "add ha9");
    let added = |tid: i32| output_message(TAG_HOSTS, 1, &[tid], b"");
    assert_eq!(
        session.handle_message(&added(9 << 18)),
        b"",
        "this console added it itself"
    );
    let announced = String::from_utf8(session.handle_message(&added(2 << 18))).expect("text");
    assert!(
        announced.starts_with("\nConsole: 1 new host added\n"),
        "{announced}"
    );
    assert!(announced.contains("ha2    80000"));
    assert_eq!(session.handle_message(&added(2 << 18)), b"");
    assert!(session.register_interactive().is_ok());
    assert_eq!(
        session.handle_message(&added(3 << 18)),
        b"",
        "it was there when the console came"
    );
}

/// `can-migrate` lists the hosts that accept a task and the reasons of the others.
#[test]
fn can_migrate_lists_hosts_and_refusals() {
    let mut session = session();
    let all = session.run_line("can-migrate t40002");
    let expected = "t40002 is on ha1, 4097 KiB\n\
                    ha2  no: /data: it does not exist on the target\n         \
                    it needs 9 bytes of memory, the target has 8\n\
                    ha3  yes\n\
                    the nearest host that would take it: ha3\n";
    assert_eq!(
        (String::from_utf8(all.text.into()).as_deref(), all.failed),
        (Ok(expected), false)
    );
    assert_eq!(all.json[0]["nearest"], "ha3");
    assert_eq!(
        all.json[0]["hosts"][0]["reasons"][1],
        "it needs 9 bytes of memory, the target has 8"
    );
    let one = session.run_line("can-migrate t40002 ha2");
    assert!(
        one.failed
            && String::from_utf8(one.text.into())
                .is_ok_and(|text| text.ends_with("no host would take it\n"))
    );
    let none = session.run_line("can-migrate tc0001");
    assert_eq!(
        none.errors,
        ["can-migrate: tc0001 cannot migrate: it has an io_uring ring"]
    );
}

/// `migrate` reports the cost of a migration or the step that failed.
#[test]
fn migrate_reports_cost_or_failed_step() {
    let mut session = session();
    assert_eq!(
        run_ok(&mut session, "migrate t40002 ha2"),
        "t40002 moved to ha2: 4096 bytes, frozen 98 ms\n"
    );
    let failed = session.run_line("migrate t40002 ha3");
    assert_eq!(
        failed.errors,
        ["t40002 was not moved to ha3: dump failed: the engine was killed by signal 9"]
    );
    assert_eq!(failed.json[0]["step"], "dump");
    let refused = session.run_line("migrate t40002 hx");
    assert_eq!(
        refused.errors,
        ["t40002 was not moved to hx: moving t40002: no host hx"]
    );
    assert!(refused.failed && refused.json[0]["step"].is_null());
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
    assert!(session.run_line("events --follow").failed);
}

/// The simple commands answer as in PVM.
#[test]
fn simple_commands_answer_as_in_pvm() {
    let mut session = session();
    assert_eq!(
        run_ok(&mut session, "names"),
        "<svc>:\n\tindex=0 owner=0x40001/262145 flags=0x0\n\n"
    );
    assert_eq!(
        run_ok(&mut session, "getopt PvmRoute"),
        "PvmRoute Currently Set to 1\n"
    );
    assert_eq!(run_ok(&mut session, "id"), "t40001\n");
    assert_eq!(run_ok(&mut session, "version"), "3.4.6\n");
    assert_eq!(run_ok(&mut session, "reset"), "");
    assert_eq!(run_ok(&mut session, "put svc 1"), "");
    assert_eq!(
        run_ok(&mut session, "jobs -l"),
        "                    HOST      TID   FLAG 0x COMMAND\n"
    );
    assert_eq!(session.run_line("quit").next, AfterCommand::Quit);
    assert_eq!(session.run_line("halt").next, AfterCommand::Halt);
}

/// A traced job shows the records of its tasks and those that the console adds.
#[test]
fn traced_job_shows_records() {
    let mut session = session();
    run_ok(&mut session, "trace buf 100");
    run_ok(&mut session, "trace opt count");
    run_ok(&mut session, "trace - *");
    run_ok(&mut session, "trace + addhosts");
    let shown = run_ok(&mut session, "spawn -@ hello");
    assert!(
        shown.starts_with("[1]\n[T1:t40001] /*\n[T1:t40001]  * \"Creation Date\" \""),
        "{shown}"
    );
    assert!(
        shown.contains("\n[T1:tc0000] \"host_add(0)\" { "),
        "{shown}"
    );
    assert!(
        shown.ends_with(", 1000 };;\n1 successful\nt80001\n"),
        "{shown}"
    );
    assert_eq!(run_ok(&mut session, "jobs"), "T1: t80001\n");
    let (output_tag, trace) = {
        let spawned = session.vm.spawned.borrow();
        assert!(spawned[0].env[0].starts_with(b"PVMTMASK=A@@@"), "addhosts");
        assert_eq!(
            spawned[0].env[0]["PVMTMASK=".len() + 75 / 4],
            b'@' + 8,
            "newtask is always in it"
        );
        assert_eq!(
            spawned[0].env[1..3],
            [&b"PVMTRCBUF=100"[..], b"PVMTRCOPT=3"]
        );
        assert_eq!(
            (spawned[0].output.tid, spawned[0].trace.tid),
            (CONSOLE, CONSOLE)
        );
        (spawned[0].output.tag, spawned[0].trace)
    };
    assert_eq!(trace.tag, TAG_TRACES + 1);
    let mut shown =
        |message: &Message| String::from_utf8(session.handle_message(message)).expect("text");
    let met = shown(&output_message(output_tag, 0x80001, &[-2, 0], b""));
    assert!(
        met.starts_with("[1] libpvmtrc: Task TID=0x80001 Connected to Console\n[T1:t80001] \n"),
        "{met}"
    );
    assert!(
        met.ends_with(" 524289, [9] { \"CREATION\" } };;\n"),
        "{met}"
    );
    let mut body = Packer::new(Encoding::Xdr);
    body.items([-5, 75]).str(b"newtask").int(-6);
    let record = Message {
        src: Tid::from_raw(0x80001),
        body: body.finish(),
        ..output_message(trace.tag, 0, &[], b"")
    };
    assert_eq!(
        shown(&record),
        "[T1:t80001] \n[T1:t80001] #1150: \"newtask(0)\"\n[T1:t80001] {\n[T1:t80001] };;\n[T1:t80001] \n\
         [T1:t80001] \"newtask(0)\" {  };;\n"
    );
    let rubbish = Message {
        body: Bytes::from_static(&[0; 4]),
        ..record
    };
    assert!(shown(&rubbish).starts_with("[1] trace records of t80001 cannot be read: "));
    let line = shown(&output_message(output_tag, 0x80001, &[6], b"hello\n"));
    assert!(
        line.ends_with(", [6] { \"hello\" } };;\n"),
        "the output is in the trace and not shown: {line}"
    );
    let end = shown(&output_message(output_tag, 0x80001, &[0], b""));
    assert!(
        end.ends_with("{ \"GOTEOF\" } };;\n[1] libpvmtrc: Trace File Complete\n"),
        "{end}"
    );
    let reminder = session
        .vm
        .sent
        .borrow()
        .last()
        .cloned()
        .expect("sent to itself");
    assert_eq!((reminder.dst, reminder.tag), (CONSOLE, TAG_CLOSE_JOB + 1));
    assert!(
        session.has_jobs(),
        "the last records come behind the end of the output"
    );
    let forged = Message {
        src: Tid::from_raw(0x40009),
        ..reminder.clone()
    };
    assert_eq!(session.handle_message(&forged), b"");
    assert_eq!(session.handle_message(&reminder), b"[1] finished\n");
    assert!(!session.has_jobs());
}

/// A trace can go to a file that only its owner can read.
#[test]
fn trace_file_is_private() {
    use std::os::unix::fs::PermissionsExt;
    let path = std::env::temp_dir().join(format!("pvm-console-trace-{}", std::process::id()));
    let _ = std::fs::remove_file(&path);
    let mut session = session();
    assert_eq!(
        run_ok(
            &mut session,
            &format!("spawn -> -@{} hello", path.display())
        ),
        "[1]\n1 successful\nt80001\n"
    );
    let tag = session.vm.spawned.borrow()[0].output.tag;
    let shown = session.handle_message(&output_message(tag, 0x80001, &[3], b"abc"));
    assert_eq!(
        String::from_utf8_lossy(&shown),
        "[1] libpvmtrc: Task TID=0x80001 Connected to Console\n"
    );
    let shown = session.handle_message(&output_message(tag, 0x80001, &[0], b""));
    assert!(
        shown.starts_with(b"[1:t80001] abc\n[1:t80001] EOF\n"),
        "{}",
        String::from_utf8_lossy(&shown)
    );
    let written = std::fs::read_to_string(&path).expect("written");
    assert!(
        written.starts_with("/*\n") && written.contains("{ \"abc\" } };;\n"),
        "{written}"
    );
    assert_eq!(
        std::fs::metadata(&path)
            .expect("there")
            .permissions()
            .mode()
            & 0o777,
        0o600
    );
    std::fs::remove_file(&path).expect("ours");
}

/// Trace settings are shown as in PVM.
#[test]
fn trace_settings_match_pvm() {
    let mut session = session();
    assert_eq!(
        run_ok(&mut session, "trace buf"),
        "\nTrace Buffering set to 0 bytes\n\n"
    );
    assert_eq!(
        run_ok(&mut session, "trace opt"),
        "\nTrace Options set to \"full\"\n\n"
    );
    assert_eq!(run_ok(&mut session, "trace opt time"), "");
    assert_eq!(
        run_ok(&mut session, "getopt PvmTraceOptions"),
        "PvmTraceOptions Currently Set to 2\n"
    );
    let unknown = session.run_line("trace opt foo").refusal;
    assert_eq!(
        unknown.as_deref(),
        Some("\nError:  Unknown Trace Option \"foo\"\n")
    );
    assert_eq!(
        session.run_line("trace nosuch").refusal.as_deref(),
        Some("no such event \"nosuch\"")
    );
    assert_eq!(run_ok(&mut session, "trace").lines().count(), 26);
    let both = session.run_line("trace - * nosuch + send opt");
    assert_eq!(
        both.text, "\nTrace Options set to \"time\"\n\n",
        "what is known is done"
    );
    assert_eq!(both.refusal.as_deref(), Some("no such event \"nosuch\""));
    assert_eq!(run_ok(&mut session, "trace").matches('*').count(), 1);
}

/// A mailbox reset selects the entries to remove.
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

/// Every command that prints something has JSON output.
#[test]
fn printing_commands_have_json() {
    let mut session = session();
    run_ok(&mut session, "alias x echo 1");
    for line in [
        "add ha9",
        "alias",
        "conf",
        "delete ha2",
        "events",
        "export",
        "getopt",
        "id",
        "jobs",
        "kill t40002",
        "migrate t40002 ha2",
        "mstat ha2",
        "names",
        "ps",
        "pstat t40002",
        "setenv",
        "setopt PvmRoute 2",
        "sig 1 t40002",
        "spawn hello",
        "tickle 5",
        "trace",
        "version",
    ] {
        let outcome = session.run_line(line);
        assert!(!outcome.json.is_empty() && !outcome.as_json, "{line}");
        let name = line.split(' ').next().expect("a word");
        let asked = session.run_line(&line.replacen(name, &format!("{name} --json"), 1));
        assert!(
            asked.as_json && asked.json.len() == outcome.json.len(),
            "{line}"
        );
    }
    for name in [
        "echo", "halt", "help", "idump", "put", "quit", "reset", "start", "unalias", "unexport",
    ] {
        assert!(!crate::parse::has_json(name), "{name}");
    }
}

/// A migration that the end of the virtual machine interrupts is not reported as failed.
#[test]
fn migration_cut_off_by_halt_is_not_failed() {
    let outcome = session().run_line("migrate t40002 gone");
    assert_eq!(
        outcome.errors,
        ["the virtual machine ended before t40002 was on gone: the daemon is gone"]
    );
}

/// `job kill` goes through the resource manager and waits for the end of the job.
#[test]
fn job_kill_waits_for_end() {
    let mut session = session();
    let outcome = session.run_line("job kill t40002");
    assert_eq!(
        outcome.text,
        "1500 tasks of job t40002 were told to end, and have ended, 3 of them by SIGKILL\n"
    );
    assert_eq!((outcome.failed, outcome.errors.len()), (false, 0));
    assert_eq!(outcome.json[0]["forced"], 3);
    let some = session.run_line("job kill t40003");
    assert_eq!(
        some.errors,
        ["job kill: t40005: its daemon does not answer"]
    );
    assert!(
        !some.failed
            && some
                .text
                .starts_with("2 tasks of job t40003 were told to end, and have ended"),
        "{some:?}"
    );
}

/// `job kill` cancels the restart of a vacated job.
#[test]
fn job_kill_cancels_vacated_job() {
    let outcome = session().run_line("job kill t40009");
    assert!(
        !outcome.failed
            && outcome
                .text
                .contains("waited in checkpoint c7 for room: it is not started again"),
        "{outcome:?}"
    );
    let nobody = session().run_line("job kill t4000a");
    assert!(nobody.failed, "{nobody:?}");
}

/// A command about something the resource manager does not know fails and says so.
#[test]
fn unknown_to_rm_is_failure() {
    for (line, said) in [
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
        let outcome = session().run_line(line);
        assert!(
            outcome.failed && outcome.errors[0].starts_with(said),
            "{outcome:?}"
        );
    }
}

/// Jobs are suspended through the resource manager, single tasks by their daemon.
#[test]
fn suspend_uses_rm_for_jobs_and_daemon_for_tasks() {
    let mut session = session();
    let outcome = session.run_line("job suspend t40003");
    let text = "2 tasks of job t40002 are suspended: t40003 t40004\nt40002 is as it was: no daemon has started it\n";
    assert_eq!((outcome.text.as_str(), outcome.failed), (text, false));
    assert_eq!(outcome.json[0]["others"][0]["tid"], "t40002");
    let outcome = session.run_line("job resume t40003");
    assert_eq!(outcome.text, "2 tasks of job t40002 go on: t40003 t40004\n");
    let outcome = session.run_line("job suspend --task t40003");
    assert_eq!(
        (outcome.text.as_str(), outcome.failed),
        ("t40003 is suspended\n", false)
    );
    let tid = Tid::from_raw(0x40003);
    let asked = session.vm.requests.borrow();
    assert!(
        asked.contains(&Request::Suspend {
            tid,
            suspend: true,
            cause: None
        }),
        "{asked:?}"
    );
}

/// Waiting spawns are listed after the jobs, with their position and reason.
#[test]
fn waiting_spawns_follow_jobs() {
    let outcome = session().run_line("job list");
    let line = "waiting: 3 of worker for job t40002, user 7, since 1970-01-01T00:00:00.000Z, number 1 in turn: \
                no host is free: h1: owner present (olga on pts/1)";
    assert_eq!(outcome.text.lines().last(), Some(line));
    let value = &outcome.json[0]["waiting"][0];
    assert_eq!(
        (&value["count"], &value["job"], &value["by"]),
        (&3.into(), &"t40002".into(), &"t40003".into())
    );
    assert_eq!((&value["since_us"], &value["turn"]), (&5.into(), &1.into()));
    let outcome = session().run_line("job list --user 9");
    assert!(!outcome.text.contains("waiting"), "{}", outcome.text);
    assert_eq!(outcome.json[0]["waiting"].as_array().map(Vec::len), Some(0));
}

/// `usage` and `job status` have text and JSON output.
#[test]
fn usage_and_jobs_have_text_and_json() {
    let outcome = session().run_line("usage");
    assert!(
        outcome
            .text
            .lines()
            .nth(1)
            .is_some_and(|line| line.trim_start().starts_with("7 ")),
        "{}",
        outcome.text
    );
    assert_eq!(outcome.json[0]["users"][0]["index"], 1.5);
    let outcome = session().run_line("job status t40002");
    assert_eq!(outcome.json[0]["tasks"][1]["tid"], "t40003");
    assert!(outcome.text.contains("runs"), "{}", outcome.text);
    assert!(
        outcome.text.contains("suspended by t80001 since "),
        "{}",
        outcome.text
    );
    assert_eq!(outcome.json[0]["job"]["suspended"]["since_us"], 5);
    assert_eq!(
        outcome.json[0]["tasks"][1]["suspended"]["why"],
        "suspended by t80001"
    );
}

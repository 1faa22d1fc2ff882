//! Programs that use a wrong shared library or lack one: the collector of their output and the
//! event log get one sentence. Simulated programs named `sleep` never connect.

use super::{spawn_request, spawned_tids};
use crate::HostId;
use crate::tests::scenario::list_events;
use crate::tests::sim::Sim;
use sempa_proto::Tid;
use sempa_proto::event::EventKind;
use sempa_proto::library_fault::{ForeignLibrary, LibrarySource, LoadFailure};
use sempa_proto::task::{Request, Sink, SpawnRequest};
use sempa_proto::tasker::FromTasker;

const OUTPUT_TAG: i32 = 44;
const LOADER_MESSAGE: &str =
    "w: error while loading shared libraries: libx.so.1: cannot open shared object file\n";

/// A task that never connects, and its console, which collects its output.
struct Scenario {
    sim: Sim,
    console: usize,
    child: Tid,
}

impl Scenario {
    fn start(seed: u64) -> Self {
        let (mut sim, console) = Sim::cluster(seed, 2);
        let output_sink = Sink {
            tid: sim.procs[console].tid(),
            ctx: 4,
            tag: OUTPUT_TAG,
        };
        let reply = sim.ask(
            console,
            Request::Spawn(SpawnRequest {
                output_sink,
                ..spawn_request("sleep", 1)
            }),
        );
        let child = spawned_tids(reply)[0].expect("started");
        Self {
            sim,
            console,
            child,
        }
    }

    fn host(&self) -> HostId {
        self.child.birth_host().expect("a task")
    }

    fn print(&mut self, text: &str) {
        let output = FromTasker::Output {
            tid: self.child,
            bytes: text.into(),
        };
        self.sim.handle(self.host(), crate::Event::Tasker(output));
    }

    fn exit(&mut self, status: i32) {
        let proc = self.sim.proc_of(self.child);
        self.sim.exit_proc(proc, status);
        let console = self.console;
        self.sim.run_until("the end of the output", |sim| {
            sim.procs[console]
                .notifications(OUTPUT_TAG)
                .iter()
                .any(|message| is_end(&message.body))
        });
    }

    /// Returns the collected output.
    fn output(&self) -> String {
        let messages = self.sim.procs[self.console].notifications(OUTPUT_TAG);
        let texts = messages
            .iter()
            .filter(|message| !is_end(&message.body))
            .filter_map(|message| message.body.get(8..))
            .map(|bytes| String::from_utf8_lossy(bytes).replace('\0', ""));
        texts.collect()
    }

    fn events(&mut self) -> Vec<EventKind> {
        list_events(&mut self.sim, self.console)
    }
}

/// True if a message to a collector is the end of the output, with the task's wait status.
fn is_end(body: &[u8]) -> bool {
    body.len() == 12 && body[4..8] == [0; 4]
}

#[test]
fn missing_library_is_reported_at_exit() {
    let mut scenario = Scenario::start(3);
    scenario.print(LOADER_MESSAGE);
    scenario.exit(LoadFailure::WAIT_STATUS);
    let event = EventKind::LibraryMissing {
        host: scenario.host(),
        tid: scenario.child,
        failure: LoadFailure::find_in(LOADER_MESSAGE.as_bytes()).expect("a failure"),
    };
    assert!(scenario.events().contains(&event));
    let output = scenario.output();
    assert!(output.contains("Sempa: t"), "{output}");
    assert!(
        output.contains("library libx.so.1 could not be loaded"),
        "{output}"
    );
}

/// A program may print the loader's words and end for another reason.
#[test]
fn other_exits_are_not_taken_for_missing_libraries() {
    for (text, status) in [
        (LOADER_MESSAGE, 1 << 8),
        ("not found\n", LoadFailure::WAIT_STATUS),
    ] {
        let mut scenario = Scenario::start(4);
        scenario.print(text);
        scenario.exit(status);
        let events = scenario.events();
        let is_missing = |event: &EventKind| matches!(event, EventKind::LibraryMissing { .. });
        assert!(!events.iter().any(is_missing), "{events:?}");
        assert!(!scenario.output().contains("Sempa:"));
    }
}

/// Each call of the program connects again. A token of no task is ignored.
#[test]
fn foreign_library_is_reported_once() {
    let mut scenario = Scenario::start(5);
    let proc = scenario.sim.proc_of(scenario.child);
    let spawn_token: i32 = scenario.sim.procs[proc]
        .env
        .iter()
        .find_map(|entry| entry.strip_prefix("PVMEPID=")?.parse().ok())
        .expect("a token");
    let fault = ForeignLibrary {
        program: "/h/master1".into(),
        source: LibrarySource::Loaded("/usr/lib/libpvm3.so.3".into()),
        own_library: Some("/opt/sempa/lib/libpvm3.so.3".into()),
    };
    for token in [spawn_token, spawn_token, spawn_token.wrapping_add(1)] {
        let event = crate::Event::ForeignLibrary {
            spawn_token: token,
            fault: fault.clone(),
        };
        scenario.sim.handle(scenario.host(), event);
    }
    scenario.exit(0);
    let event = EventKind::ForeignLibrary {
        host: scenario.host(),
        tid: scenario.child,
        fault,
    };
    let events = scenario.events();
    assert_eq!(
        events.iter().filter(|other| **other == event).count(),
        1,
        "{events:?}"
    );
    assert_eq!(scenario.output().matches("Sempa: t").count(), 1);
}

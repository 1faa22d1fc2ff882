use super::*;
use pvm_load_watcher::machine_link::{MessageReader, STATE_BYTES_MAX, ask_alive, encode, send};
use sempa_proto::owner::GuestAccess;
use std::collections::VecDeque;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

/// The load watcher of a machine with sources of its own.
struct TestMachine {
    watcher: MachineWatcher,
    dir: tempfile::TempDir,
    service: UnixStream,
}

/// The load watcher of a virtual machine.
struct TestClient {
    stream: UnixStream,
    reader: MessageReader<FromMachine>,
    unread: VecDeque<FromMachine>,
}

fn source_args(dir: &Path) -> SourceArgs {
    let path = |name: &str| dir.join(name);
    SourceArgs {
        utmp: Some(path("utmp")),
        sessions: path("sessions"),
        bus: format!("unix:path={}", path("bus").display()),
        terminals: path("terminals"),
        interrupts: path("interrupts"),
        meminfo: None,
        admin_policy: path("owner.toml"),
        owner_words: path("words"),
    }
}

impl TestMachine {
    fn start(admin_policy: &str) -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        for name in ["words", "account"] {
            fs::create_dir(dir.path().join(name)).expect("the test's own folder");
        }
        let args = source_args(dir.path());
        fs::write(&args.admin_policy, admin_policy).expect("the test's own file");
        let (service, far_end) = UnixStream::pair().expect("a pair");
        for socket in [&service, &far_end] {
            socket.set_nonblocking(true).expect("a socket");
        }
        let paths = CommonPaths {
            admin: args.admin_policy.clone(),
            overrides: args.owner_words.clone(),
        };
        let listener = open_listener(&dir.path().join(SOCKET_NAME)).expect("own folder");
        let supervisor = Supervisor::from(std::os::fd::OwnedFd::from(far_end));
        let account_dir = dir.path().join("account");
        let watcher = MachineWatcher::new(listener, supervisor, paths, account_dir, &args);
        Self {
            watcher: watcher.expect("it starts"),
            dir,
            service,
        }
    }

    fn connect(&self) -> TestClient {
        let stream = UnixStream::connect(self.dir.path().join(SOCKET_NAME)).expect("it listens");
        stream.set_nonblocking(true).expect("a socket");
        TestClient {
            stream,
            reader: MessageReader::new(STATE_BYTES_MAX),
            unread: VecDeque::new(),
        }
    }

    /// Runs the load watcher until `find` returns a value.
    fn run_until<T>(&mut self, mut find: impl FnMut() -> Option<T>) -> T {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            if let Some(value) = find() {
                return value;
            }
            assert!(Instant::now() < deadline, "nothing is found");
            self.watcher.next_sample_at = self.watcher.now();
            assert!(self.watcher.run_once().expect("it runs"), "it ends");
        }
    }

    /// Returns the next message to a client; `None` if the connection has ended.
    fn next_message(&mut self, client: &mut TestClient) -> Option<FromMachine> {
        self.run_until(|| {
            if client.unread.is_empty() {
                match client.reader.read(&client.stream) {
                    Ok(messages) => client.unread.extend(messages),
                    Err(_) => return Some(None),
                }
            }
            client.unread.pop_front().map(Some)
        })
    }

    /// Returns the last line that the tasker service has received.
    fn last_line(&mut self) -> String {
        let mut service = self.service.try_clone().expect("a descriptor");
        self.run_until(|| {
            let mut buffer = [0; 4096];
            let count = service.read(&mut buffer).ok()?;
            let text = String::from_utf8_lossy(&buffer[..count]).into_owned();
            text.lines().next_back().map(str::to_string)
        })
    }
}

fn facts(user_policy: &str) -> VmFacts {
    VmFacts {
        protocol: PROTOCOL_VERSION,
        has_rm: true,
        guest_defaults: String::new(),
        user_policy: PolicyFile {
            name: "own".into(),
            content: PolicyFileContent::Text(user_policy.into()),
        },
        daemon_pid: Some(1),
    }
}

impl TestClient {
    fn send(&self, message: &ToMachine) {
        send(&self.stream, message).expect("room");
    }
}

fn state(message: Option<FromMachine>) -> HostState {
    match message {
        Some(FromMachine::State(state)) => *state,
        other => panic!("{other:?}"),
    }
}

/// A virtual machine gets the state of the machine with the merged policy, and again after each
/// change. Its pings are answered.
#[test]
fn state_follows_the_policies() {
    let mut machine = TestMachine::start("cores = 3\n");
    let mut client = machine.connect();
    client.send(&ToMachine::Facts(facts("nice = 7\n")));
    let first = state(machine.next_message(&mut client));
    assert_eq!((first.policy.nice, first.policy.cores), (Some(7), Some(3)));
    assert_eq!(first.decision.access, GuestAccess::Welcome);
    assert_eq!(machine.last_line(), "guests 3");
    client.send(&ToMachine::Facts(facts("nice = 8\n")));
    while state(machine.next_message(&mut client)).policy.nice != Some(8) {}
    let admin_policy = machine.dir.path().join("owner.toml");
    fs::write(admin_policy, "never = [\"always\"]\n").expect("the test's own file");
    while state(machine.next_message(&mut client)).decision.access == GuestAccess::Welcome {}
    while machine.last_line() != "guests unlimited" {}
    client.send(&ToMachine::Ping(5));
    while machine.next_message(&mut client) != Some(FromMachine::Pong(5)) {}
}

/// The statement of one user about an own virtual machine does not concern others, and a malformed
/// file closes the machine to that user's guests only.
#[test]
fn statements_of_a_user_concern_the_own_virtual_machine() {
    let mut machine = TestMachine::start("");
    let (mut own, mut other) = (machine.connect(), machine.connect());
    own.send(&ToMachine::Facts(facts("this is no policy")));
    other.send(&ToMachine::Facts(facts("")));
    let own_state = state(machine.next_message(&mut own));
    assert!(matches!(
        own_state.decision.access,
        GuestAccess::Paused { .. }
    ));
    let other_state = state(machine.next_message(&mut other));
    assert_eq!(other_state.decision.access, GuestAccess::Welcome);
    assert!(other_state.policy.errors.is_empty());
}

/// Another version, garbage, and floods end a connection, and no other one.
#[test]
fn bad_clients_are_disconnected() {
    let mut machine = TestMachine::start("");
    let mut good = machine.connect();
    good.send(&ToMachine::Facts(facts("")));
    state(machine.next_message(&mut good));
    let mut other_version = machine.connect();
    let later = PROTOCOL_VERSION + 1;
    other_version.send(&ToMachine::Facts(VmFacts {
        protocol: later,
        ..facts("")
    }));
    match machine.next_message(&mut other_version) {
        Some(FromMachine::Refused(reason)) => {
            assert!(reason.ends_with(&format!("protocol {later}")), "{reason}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(machine.next_message(&mut other_version), None);
    for bytes in [
        vec![0xff; 64],
        vec![3, 0, 0, 0, 0xff, 0xff, 0xff],
        encode(&ToMachine::Ping(1)).expect("short").repeat(500),
    ] {
        let mut bad = machine.connect();
        bad.stream.write_all(&bytes).expect("room");
        while machine.next_message(&mut bad).is_some() {}
    }
    good.send(&ToMachine::Ping(9));
    while machine.next_message(&mut good) != Some(FromMachine::Pong(9)) {}
}

/// An administrator can ask whether the load watcher runs.
#[test]
fn load_watcher_answers_when_asked() {
    let mut machine = TestMachine::start("");
    let path = machine.dir.path().join(SOCKET_NAME);
    let question = std::thread::spawn(move || ask_alive(&path, Duration::from_secs(60)));
    machine.run_until(|| question.is_finished().then_some(()));
    question.join().expect("no panic").expect("it answers");
    let missing = machine.dir.path().join("missing");
    assert!(ask_alive(&missing, Duration::from_secs(60)).is_err());
}

/// A user cannot use up the connections of others.
#[test]
fn user_has_few_connections() {
    let mut connections = Connections::default();
    let connection = |uid| {
        let (stream, far_end) = UnixStream::pair().expect("a pair");
        (Connection::new(stream, uid, 1), far_end)
    };
    let mut far_ends = Vec::new();
    for uid in [7; 40].into_iter().chain([8]) {
        let (connection, far_end) = connection(uid);
        connections.add(connection);
        far_ends.push(far_end);
    }
    let users: Vec<u32> = connections
        .ids()
        .into_iter()
        .filter_map(|id| connections.get_mut(id).map(|connection| connection.uid))
        .collect();
    assert_eq!(users.iter().filter(|uid| **uid == 7).count(), 32);
    assert!(users.contains(&8));
}

/// The process ends with the tasker service.
#[test]
fn end_of_the_service_ends_the_load_watcher() {
    let mut machine = TestMachine::start("");
    machine
        .service
        .shutdown(std::net::Shutdown::Both)
        .expect("own socket");
    assert!(!machine.watcher.run_once().expect("it runs"));
}

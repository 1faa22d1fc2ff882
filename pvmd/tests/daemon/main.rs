//! Tests of the daemon as a process: start, refusals, repair, service, hosts, end. Each test has
//! its own directory as `PVM_TMP`, and a remote shell that runs the command on this machine with
//! another `PVM_TMP`.

mod manual_start;

use bytes::Bytes;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};
use procfs::process::{Process, all_processes};
use sempa_proto::frame::{Frame, FrameDecoder, encode_control, encode_link};
use sempa_proto::link::{FRAGMENT_BYTES_MAX, LinkFrame, LinkKind};
use sempa_proto::route::{OfferId, RouteMsg};
use sempa_proto::task::{Claim, Hello, OnDaemonExit, Reply, Request, TASK_MAGIC, ToDaemon, ToTask};
use sempa_proto::{PvmError, RequestId, Tid, WIRE_VERSION};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, IoSlice, IoSliceMut, Read, Write};
use std::net::UdpSocket;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Time limit of every wait; a loaded machine may need much of it.
const DEADLINE: Duration = Duration::from_secs(60);

/// The virtual machine of one test.
struct Vm {
    dir: tempfile::TempDir,
    master: Option<Child>,
    lease_ms: u32,
}

impl Vm {
    fn new() -> Vm {
        let dir = tempfile::Builder::new()
            .prefix("pvmd")
            .tempdir()
            .expect("a scratch directory");
        fs::create_dir(dir.path().join("master")).expect("writable");
        let script = format!(
            "#!/bin/sh\n# rsh host [-l user] command\nhost=$1; shift\n[ \"$1\" = -l ] && shift 2\n\
             case $host in\n\
             nowhere) echo 'ssh: Could not resolve hostname nowhere: Name or service not known' >&2; exit 255;;\n\
             closed) echo 'ssh: connect to host closed port 22: Connection refused' >&2; exit 255;;\n\
             bare) echo 'sh: 1: exec: pvmd: not found' >&2; exit 127;;\n\
             same*) PVM_TMP={dir}/same; export PVM_TMP;;\n\
             *) PVM_TMP={dir}/$host; export PVM_TMP;;\n\
             esac\n\
             mkdir -p $PVM_TMP\nexec sh -c \"$*\"\n",
            dir = dir.path().display()
        );
        let path = dir.path().join("rsh");
        fs::write(&path, script).expect("writable");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("ours");
        Vm {
            dir,
            master: None,
            lease_ms: 10_000,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Returns a command for `pvmd` with the environment of this virtual machine.
    fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pvmd"));
        command
            .env_remove("PVM_RM")
            .env_remove("PVM_VMID")
            .env_remove("PVM_DPATH")
            .env_remove("PVMHOSTFILE")
            .env_remove("SEMPA_LOG")
            .env_remove("SEMPA_LOG_FILTER")
            .env("PVM_TMP", self.path("master"))
            .env("PVM_RSH", self.path("rsh"))
            .env("SEMPA_ADDRESS", "127.0.0.1")
            .env("SEMPA_LEASE_MS", self.lease_ms.to_string())
            .env("PVM_ALLOW_ROOT", "1")
            .stdin(Stdio::null());
        command
    }

    /// Starts the master and waits for the line with its socket.
    fn start(&mut self) -> PathBuf {
        self.start_as(self.command())
    }

    fn start_as(&mut self, mut command: Command) -> PathBuf {
        let mut child = command
            .stdout(Stdio::piped())
            .spawn()
            .expect("pvmd can be run");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("a pipe"))
            .read_line(&mut line)
            .expect("readable");
        self.master = Some(child);
        assert!(!line.is_empty(), "the master ended without its line");
        PathBuf::from(line.trim_end())
    }

    fn pid(&self) -> i32 {
        i32::try_from(self.master.as_ref().expect("started").id()).expect("a pid")
    }

    fn signal(&self, signal: nix::sys::signal::Signal) {
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(self.pid()), signal)
            .expect("it is our child");
    }

    /// Waits for the end of the master and returns its status.
    fn wait_for_end(&mut self) -> std::process::ExitStatus {
        let mut child = self.master.take().expect("started");
        let mut status = None;
        until("the master ends", || {
            status = child.try_wait().expect("our child");
            status.is_some()
        });
        status.expect("it has ended")
    }

    /// Returns the processes of this virtual machine, found by the directory in their environment.
    fn processes(&self) -> Vec<String> {
        let mark = self.dir.path().to_string_lossy().into_owned();
        let mut found = Vec::new();
        for process in all_processes().expect("/proc").flatten() {
            let environ = process.environ().unwrap_or_default();
            let has_mark = |value: &OsString| value.to_string_lossy().contains(&mark);
            if environ.values().any(has_mark) {
                let line = process.cmdline().unwrap_or_default().join(" ");
                found.push(format!("{} {line}", process.pid));
            }
        }
        found
    }

    /// Counts the programs of this virtual machine. Processes that a tasker keeps ready for tasks
    /// do not count.
    fn program_count(&self) -> usize {
        let lines: BTreeMap<String, String> = (self.processes().iter())
            .filter_map(|found| found.split_once(' '))
            .map(|(pid, line)| (pid.into(), line.into()))
            .collect();
        let parent = |pid: &String| {
            let status = checkpoint::proc::status(pid.parse().expect("a number"));
            status.map(|status| status.ppid.to_string())
        };
        let is_copy = |pid: &String, line: &String| {
            parent(pid).is_some_and(|parent| lines.get(&parent) == Some(line))
        };
        lines
            .iter()
            .filter(|(pid, line)| !is_copy(pid, line))
            .count()
    }

    /// Asserts that no process and no file of the virtual machine remains.
    fn assert_clean(&self) {
        until("no process is left", || self.processes().is_empty());
        for entry in fs::read_dir(self.dir.path())
            .expect("ours")
            .flatten()
            .filter(|e| e.path().is_dir())
        {
            let left: Vec<_> = fs::read_dir(entry.path())
                .expect("ours")
                .flatten()
                .map(|e| e.path())
                .collect();
            assert!(left.is_empty(), "left behind: {left:?}");
        }
    }

    fn log(&self) -> String {
        fs::read_to_string(self.path(&format!("master/sempa-{}/pvm/pvml", nix::unistd::getuid())))
            .unwrap_or_default()
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!(
                "log of the master:\n{}\nprocesses: {:?}",
                self.log(),
                self.processes()
            );
        }
        if let Some(mut child) = self.master.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Waits until the condition holds. Panics after [`DEADLINE`].
fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !holds() {
        assert!(begin.elapsed() < DEADLINE, "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A task's side of the daemon's socket.
struct Task {
    stream: UnixStream,
    decoder: FrameDecoder,
    requests: u64,
    tid: Option<Tid>,
}

impl Task {
    fn connect(socket: &Path) -> Task {
        let stream = UnixStream::connect(socket).expect("the daemon listens");
        stream.set_read_timeout(Some(DEADLINE)).expect("a socket");
        Task {
            stream,
            decoder: FrameDecoder::new(),
            requests: 0,
            tid: None,
        }
    }

    /// Connects and waits for the welcome.
    fn enrol(socket: &Path) -> Task {
        let mut task = Task::connect(socket);
        let pid = i32::try_from(std::process::id()).expect("a pid");
        let hello = Hello {
            magic: TASK_MAGIC,
            version: WIRE_VERSION,
            claim: Claim::New,
            own_pid: pid,
            program: "a test".into(),
            on_daemon_exit: OnDaemonExit::FailCalls,
        };
        task.send(&ToDaemon::Hello(hello));
        match task.read() {
            Some(ToTask::Welcome(welcome)) => task.tid = Some(welcome.tid),
            first => panic!("{first:?}"),
        }
        task
    }

    fn send(&mut self, message: &ToDaemon) {
        self.stream
            .write_all(&encode_control(message).expect("small"))
            .expect("the daemon reads");
    }

    /// Returns the next message; `None` at the end of the stream.
    fn read(&mut self) -> Option<ToTask> {
        Some(self.read_frame()?.decode_control().expect("a message"))
    }

    /// Returns the next frame of any kind; `None` at the end of the stream.
    fn read_frame(&mut self) -> Option<Frame> {
        loop {
            if let Some(frame) = self.decoder.next_frame().expect("good frames") {
                return Some(frame);
            }
            let mut bytes = [0; 4096];
            match self.stream.read(&mut bytes) {
                Ok(0) => return None,
                Ok(n) => self.decoder.push(&bytes[..n]),
                Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => return None,
                Err(e) => panic!("no answer of the daemon: {e}"),
            }
        }
    }

    /// Sends a fragment of a message.
    fn send_fragment(&mut self, dst: Tid, seq: u64, payload: Bytes) {
        let kind = LinkKind::Data { last: true };
        let frame = LinkFrame {
            src: self.tid(),
            dst,
            kind,
            seq,
            ack: 0,
            incarnation: 0,
            payload,
        };
        self.stream
            .write_all(&encode_link(&frame))
            .expect("the daemon reads");
    }

    /// Returns the number of the next fragment.
    fn read_fragment(&mut self) -> u64 {
        let frame = self.read_frame().expect("the daemon writes");
        frame.decode_link().expect("a fragment").seq
    }

    /// Sends frames in one write, with descriptors at the first byte.
    fn send_with_descriptors(&mut self, messages: &[ToDaemon], descriptors: &[RawFd]) {
        let bytes: Vec<u8> = messages
            .iter()
            .flat_map(|m| encode_control(m).expect("small").to_vec())
            .collect();
        let control = [ControlMessage::ScmRights(descriptors)];
        let (fd, parts) = (self.stream.as_raw_fd(), [IoSlice::new(&bytes)]);
        let sent =
            sendmsg::<()>(fd, &parts, &control, MsgFlags::empty(), None).expect("the daemon reads");
        assert_eq!(sent, bytes.len());
    }

    /// Returns the next message and the files of the descriptors that came with it.
    fn read_with_files(&mut self) -> (ToTask, Vec<File>) {
        let (mut bytes, mut space) = ([0; 4096], nix::cmsg_space!([RawFd; 8]));
        let mut parts = [IoSliceMut::new(&mut bytes)];
        let flags = MsgFlags::MSG_CMSG_CLOEXEC;
        let fd = self.stream.as_raw_fd();
        let got =
            recvmsg::<()>(fd, &mut parts, Some(&mut space), flags).expect("the daemon speaks");
        let mut files = Vec::new();
        for message in got.cmsgs().expect("whole") {
            let ControlMessageOwned::ScmRights(fds) = message else {
                panic!("{message:?}")
            };
            // Opened again by their names, so that each descriptor is closed once.
            files.extend(
                fds.iter()
                    .map(|fd| File::open(format!("/proc/self/fd/{fd}")).expect("open")),
            );
            fds.into_iter()
                .for_each(|fd| nix::unistd::close(fd).expect("ours"));
        }
        let length = got.bytes;
        self.decoder.push(&bytes[..length]);
        (self.read().expect("a word"), files)
    }

    fn tid(&self) -> Tid {
        self.tid.expect("welcomed")
    }

    fn ask(&mut self, what: Request) -> Reply {
        self.requests += 1;
        let id = RequestId(self.requests);
        self.send(&ToDaemon::Request { id, request: what });
        loop {
            match self.read() {
                Some(ToTask::Reply { id: of, reply }) if of == id => return reply,
                Some(_) => {}
                None => panic!("the daemon closed the connection"),
            }
        }
    }

    fn add(&mut self, lines: &[&str]) -> Vec<Result<String, (PvmError, String)>> {
        let lines = lines.iter().map(|l| l.to_string()).collect();
        match self.ask(Request::AddHosts { lines }) {
            Reply::HostsAdded(added) => added
                .into_iter()
                .map(|a| a.result.map(|entry| entry.name).map_err(|e| (e, a.reason)))
                .collect(),
            reply => panic!("{reply:?}"),
        }
    }
}

fn text(output: &Output) -> (String, String) {
    (
        String::from_utf8_lossy(&output.stdout).into_owned(),
        String::from_utf8_lossy(&output.stderr).into_owned(),
    )
}

/// The master prints the path of its socket, and leaves no file after SIGTERM.
#[test]
fn master_prints_its_socket_and_leaves_no_file() {
    let mut vm = Vm::new();
    let socket = vm.start();
    assert_eq!(
        socket,
        vm.path(&format!(
            "master/sempa-{}/pvm/pvmd.sock",
            nix::unistd::getuid()
        ))
    );
    let task = Task::enrol(&socket);
    vm.signal(nix::sys::signal::Signal::SIGTERM);
    assert!(vm.wait_for_end().success());
    drop(task);
    vm.assert_clean();
}

/// A second virtual machine of the same name is refused in one line.
#[test]
fn second_vm_of_the_same_name_is_refused() {
    let mut vm = Vm::new();
    let socket = vm.start();
    let second = vm.command().output().expect("pvmd can be run");
    assert_eq!(second.status.code(), Some(1));
    let (out, err) = text(&second);
    assert_eq!((out.as_str(), err.lines().count()), ("", 1), "{err}");
    let process = format!("process {}", vm.pid());
    for part in [
        "a virtual machine named pvm of this user is running already",
        &process,
        "PVM_VMID",
    ] {
        assert!(err.contains(part), "{err}");
    }
    Task::enrol(&socket);
    vm.signal(nix::sys::signal::Signal::SIGINT);
    assert!(vm.wait_for_end().success());
    vm.assert_clean();
}

/// The next start repairs the files that a killed daemon left.
#[test]
fn start_repairs_files_of_a_killed_daemon() {
    let mut vm = Vm::new();
    let socket = vm.start();
    let dir = socket.parent().expect("a directory").to_path_buf();
    fs::create_dir(dir.join("images-9")).expect("ours");
    fs::write(dir.join("resume-9"), "token").expect("ours");
    vm.signal(nix::sys::signal::Signal::SIGKILL);
    vm.wait_for_end();
    assert!(socket.exists() && dir.join("pvmd.lock").exists());
    until("its tasker ends with it", || vm.processes().is_empty());
    assert_eq!(vm.start(), socket);
    assert!(!dir.join("images-9").exists() && !dir.join("resume-9").exists());
    Task::enrol(&socket);
    // The log is written by another thread, and may come later than the answers.
    until("the log says what was found", || {
        vm.log().contains("ended without cleaning up")
    });
    vm.signal(nix::sys::signal::Signal::SIGTERM);
    assert!(vm.wait_for_end().success());
    vm.assert_clean();
}

/// A daemon that gets garbage on its socket and port still serves its tasks.
#[test]
fn daemon_survives_garbage_on_socket_and_port() {
    let mut vm = Vm::new();
    let socket = vm.start();
    let mut good = Task::enrol(&socket);
    for garbage in [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        &[0xff; 5000],
        &[9, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8],
    ] {
        let mut stranger = Task::connect(&socket);
        let _ = stranger.stream.write_all(garbage);
        let answer = stranger.read();
        assert!(
            matches!(answer, Some(ToTask::Refused { .. }) | None),
            "{answer:?}"
        );
        // Garbage after a valid hello.
        let mut stranger = Task::enrol(&socket);
        let _ = stranger.stream.write_all(garbage);
        until("it is cut off", || stranger.read().is_none());
    }
    let mut old = Task::connect(&socket);
    let hello = Hello {
        magic: TASK_MAGIC,
        version: 999,
        claim: Claim::New,
        own_pid: 1,
        program: String::new(),
        on_daemon_exit: OnDaemonExit::FailCalls,
    };
    old.send(&ToDaemon::Hello(hello));
    match old.read() {
        Some(ToTask::Refused { reason }) => assert!(reason.contains("version 999"), "{reason}"),
        answer => panic!("{answer:?}"),
    }
    let Reply::Hosts(table) = good.ask(Request::Config) else {
        panic!("no host table")
    };
    let udp = UdpSocket::bind("127.0.0.1:0").expect("a port");
    for len in [1, 20, 1200, 60_000] {
        for byte in [0u8, 0x40, 0xc3, 0xff] {
            udp.send_to(&vec![byte; len], table.hosts[0].addresses[0])
                .expect("loopback");
        }
    }
    assert_eq!(good.add(&["h2"]), [Ok("h2".to_string())]);
    let Reply::Hosts(_) = good.ask(Request::Config) else {
        panic!("no host table")
    };
    vm.signal(nix::sys::signal::Signal::SIGTERM);
    assert!(vm.wait_for_end().success());
    vm.assert_clean();
}

/// Returns a file in memory with this content.
fn memory(text: &str) -> OwnedFd {
    let fd = memfd_create("a test's", MFdFlags::MFD_CLOEXEC).expect("memory");
    nix::unistd::write(&fd, text.as_bytes()).expect("room");
    fd
}

fn contents(files: Vec<File>) -> Vec<String> {
    let read = |mut file: File| {
        let mut text = String::new();
        file.read_to_string(&mut text).expect("a file");
        text
    };
    files.into_iter().map(read).collect()
}

fn offer(to: Tid, id: u64) -> ToDaemon {
    ToDaemon::Route {
        to,
        message: RouteMsg::RingOffer {
            id: OfferId(id),
            slot: 0,
        },
    }
}

fn assert_hosts_reply(task: &mut Task) {
    let reply = task.read();
    assert!(
        matches!(
            reply,
            Some(ToTask::Reply {
                reply: Reply::Hosts(_),
                ..
            })
        ),
        "{reply:?}"
    );
}

/// Descriptors arrive with their message; a message without its descriptors closes the connection.
#[test]
fn missing_descriptor_closes_the_connection() {
    let mut vm = Vm::new();
    let socket = vm.start();
    let [mut a, mut b] = [Task::enrol(&socket), Task::enrol(&socket)];
    let open = |vm: &Vm| {
        let daemon = Process::new(vm.pid()).expect("our child");
        daemon.fd_count().expect("our child")
    };
    let before = open(&vm);
    let [rings, bell] = [memory("rings"), memory("bell")];
    let two = [rings.as_raw_fd(), bell.as_raw_fd()];
    for id in 1..=50 {
        // One frame before the message and one after it, as a busy library writes them.
        a.send(&ToDaemon::Request {
            id: RequestId(2 * id),
            request: Request::Config,
        });
        let after = ToDaemon::Request {
            id: RequestId(2 * id + 1),
            request: Request::Config,
        };
        a.send_with_descriptors(&[offer(b.tid(), id), after], &two);
        let (word, files) = b.read_with_files();
        let expected = RouteMsg::RingOffer {
            id: OfferId(id),
            slot: 0,
        };
        assert_eq!(
            word,
            ToTask::Route {
                from: a.tid(),
                same_host: true,
                message: expected
            }
        );
        assert_eq!(contents(files), ["rings", "bell"]);
        for _ in 0..2 {
            assert_hosts_reply(&mut a);
        }
        let word = RouteMsg::RingAccept {
            id: OfferId(id),
            slot: 7,
        };
        b.send_with_descriptors(
            &[ToDaemon::Route {
                to: a.tid(),
                message: word.clone(),
            }],
            &[memory("bell of b").as_raw_fd()],
        );
        let (answer, files) = a.read_with_files();
        assert_eq!(
            answer,
            ToTask::Route {
                from: b.tid(),
                same_host: true,
                message: word
            }
        );
        assert_eq!(contents(files), ["bell of b"]);
    }
    let config = || ToDaemon::Request {
        id: RequestId(999),
        request: Request::Config,
    };
    let breaches: [(&[ToDaemon], usize); 4] = [
        (&[offer(b.tid(), 1)], 0),
        (&[offer(b.tid(), 1)], 1),
        (&[offer(b.tid(), 1)], 3),
        (&[config()], 1),
    ];
    for (messages, count) in breaches {
        let mut stranger = Task::enrol(&socket);
        stranger.send_with_descriptors(messages, &vec![bell.as_raw_fd(); count]);
        until("it is cut off", || stranger.read().is_none());
    }
    drop(a);
    let gone = b.read();
    assert!(matches!(gone, Some(ToTask::PeerGone { .. })), "{gone:?}");
    // One connection and its process descriptor are closed; no passed descriptor remains.
    until("its descriptors are closed", || open(&vm) == before - 2);
    vm.signal(nix::sys::signal::Signal::SIGTERM);
    assert!(vm.wait_for_end().success());
    vm.assert_clean();
}

/// A task that does not read delays no other task and loses no message.
#[test]
fn task_that_does_not_read_loses_no_message() {
    let mut vm = Vm::new();
    let socket = vm.start();
    let (mut talker, mut deaf, mut other) = (
        Task::enrol(&socket),
        Task::enrol(&socket),
        Task::enrol(&socket),
    );
    // As a task does at its end: without a window and without retransmission.
    let (payload, count) = (Bytes::from(vec![7; FRAGMENT_BYTES_MAX]), 2200);
    for seq in 1..=count {
        talker.send_fragment(deaf.tid(), seq, payload.clone());
    }
    talker.send_fragment(other.tid(), 1, Bytes::new());
    assert_eq!(other.read_fragment(), 1);
    talker
        .stream
        .shutdown(std::net::Shutdown::Both)
        .expect("a socket");
    for seq in 1..=count {
        assert_eq!(deaf.read_fragment(), seq);
    }
}

/// The remote shell adds hosts, and halt ends all daemons and tasks.
#[test]
fn remote_shell_adds_hosts_and_halt_ends_all() {
    let mut vm = Vm::new();
    let socket = vm.start();
    let mut task = Task::enrol(&socket);
    let added = task.add(&[
        "h2",
        "h3 sp=2000",
        "nowhere",
        "closed",
        "bare",
        "h4 lo=somebody",
    ]);
    let names: Vec<_> = added
        .iter()
        .map(|a| a.as_ref().map(String::as_str).map_err(|(e, _)| *e))
        .collect();
    let cant = Err(PvmError::CantStart);
    assert_eq!(
        names,
        [
            Ok("h2"),
            Ok("h3"),
            Err(PvmError::NoHost),
            cant,
            cant,
            Ok("h4")
        ],
        "{added:?}"
    );
    let reason = |n: usize| added[n].as_ref().expect_err("refused").1.clone();
    assert!(
        reason(2).contains("nowhere") && reason(2).contains("unknown"),
        "{}",
        reason(2)
    );
    assert!(
        reason(3).contains("Connection refused") && reason(3).contains("PVM_RSH"),
        "{}",
        reason(3)
    );
    assert!(
        reason(4).contains("not found there") && reason(4).contains("dx="),
        "{}",
        reason(4)
    );
    let Reply::Hosts(table) = task.ask(Request::Config) else {
        panic!("no host table")
    };
    assert_eq!(table.hosts.len(), 4);
    // A task on the other host sees the same table.
    let uid = nix::unistd::getuid();
    let there = vm.path(&format!("h3/sempa-{uid}/pvm/pvmd.sock"));
    let mut other = Task::enrol(&there);
    until(
        "the table is known there",
        || matches!(other.ask(Request::Config), Reply::Hosts(t) if t.hosts.len() == 4),
    );
    let more = task.add(&["same1", "same2"]);
    let duplicate = more
        .iter()
        .filter(|m| matches!(m, Err((PvmError::DupHost, _))))
        .count();
    assert_eq!(
        (more.iter().filter(|m| m.is_ok()).count(), duplicate),
        (1, 1),
        "{more:?}"
    );
    assert!(vm.processes().len() >= 5, "{:?}", vm.processes());
    task.send(&ToDaemon::Request {
        id: RequestId(99),
        request: Request::Halt,
    });
    assert!(vm.wait_for_end().success());
    vm.assert_clean();
}

#[test]
fn slave_ends_when_its_master_is_killed() {
    let mut vm = Vm::new();
    vm.lease_ms = 3000;
    let socket = vm.start();
    let mut task = Task::enrol(&socket);
    assert_eq!(task.add(&["h2"]), [Ok("h2".to_string())]);
    vm.signal(nix::sys::signal::Signal::SIGKILL);
    vm.wait_for_end();
    until("the slave ends too", || vm.processes().is_empty());
    assert_eq!(fs::read_dir(vm.path("h2")).expect("ours").count(), 0);
}

/// A slave that finds no master reports that in one line.
#[test]
fn slave_without_master_reports_it_in_one_line() {
    let vm = Vm::new();
    for input in ["", "hello\n", "{\"ddpro\":1}\n"] {
        let mut child = vm
            .command()
            .arg("-s")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("pvmd runs");
        child
            .stdin
            .take()
            .expect("a pipe")
            .write_all(input.as_bytes())
            .expect("it reads");
        let output = child.wait_with_output().expect("it ends");
        let (out, _) = text(&output);
        assert_eq!(
            (output.status.code(), out.lines().count()),
            (Some(1), 1),
            "{out}"
        );
        assert!(out.starts_with("sempa-error: "), "{out}");
    }
    vm.assert_clean();
}

fn require_root() {
    assert!(
        nix::unistd::getuid().is_root(),
        "cannot run here: this needs root"
    );
}

/// Another user is refused, with the reason.
#[test]
#[ignore = "system tier: needs root"]
fn other_user_is_refused_with_reason() {
    const NOBODY: u32 = 65_534;
    let mut vm = Vm::new();
    require_root();
    // The daemon belongs to the user `nobody`, and root is the other user: only root can reach the
    // socket at all.
    let program = vm.path("pvmd");
    fs::copy(env!("CARGO_BIN_EXE_pvmd"), &program).expect("writable");
    fs::set_permissions(vm.dir.path(), fs::Permissions::from_mode(0o755)).expect("ours");
    std::os::unix::fs::chown(vm.path("master"), Some(NOBODY), Some(NOBODY)).expect("root may");
    let mut command = Command::new(&program);
    let same = vm.command();
    command.env_clear().envs(
        same.get_envs()
            .filter_map(|(name, value)| Some((name, value?))),
    );
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    std::os::unix::process::CommandExt::uid(&mut command, NOBODY);
    let mut child = command.spawn().expect("pvmd can be run");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("a pipe"))
        .read_line(&mut line)
        .expect("readable");
    vm.master = Some(child);
    match Task::connect(Path::new(line.trim_end())).read() {
        Some(ToTask::Refused { reason }) => {
            assert!(
                reason.contains(&format!("serves user {NOBODY} only, and you are user 0")),
                "{reason}"
            );
        }
        answer => panic!("{answer:?}"),
    }
    vm.signal(nix::sys::signal::Signal::SIGTERM);
    assert!(vm.wait_for_end().success());
    vm.assert_clean();
}

/// Root is refused without `PVM_ALLOW_ROOT`.
#[test]
#[ignore = "system tier: needs root"]
fn root_needs_permission() {
    let vm = Vm::new();
    require_root();
    let output = vm
        .command()
        .env_remove("PVM_ALLOW_ROOT")
        .output()
        .expect("pvmd runs");
    let (out, err) = text(&output);
    assert_eq!(
        (output.status.code(), out.as_str(), err.lines().count()),
        (Some(1), "", 1),
        "{err}"
    );
    assert!(err.contains("PVM_ALLOW_ROOT"), "{err}");
    vm.assert_clean();
}

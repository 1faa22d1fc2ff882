//! Tests of the daemon as a process: start, refusals, repair, service, hosts, end. Each test has
//! its own directory as `PVM_TMP`, and a remote shell that runs the command on this machine with
//! another `PVM_TMP`.

mod manual_start;

use bytes::Bytes;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};
use procfs::process::{FDTarget, Process, all_processes};
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

/// Time limit of every wait. A loaded machine may need much of this time.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

/// The virtual machine of one test.
struct Vm {
    dir: tempfile::TempDir,
    master_process: Option<Child>,
    lease_ms: u32,
}

impl Vm {
    fn new() -> Self {
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
        Self {
            dir,
            master_process: None,
            lease_ms: 10_000,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Returns a command for `pvmd` with the environment of this virtual machine.
    fn pvmd_command(&self) -> Command {
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

    /// Starts the master and waits for the line with the path of the master's socket. Returns the
    /// path.
    fn start_master(&mut self) -> PathBuf {
        self.start_with(self.pvmd_command())
    }

    fn start_with(&mut self, mut command: Command) -> PathBuf {
        let mut child = command
            .stdout(Stdio::piped())
            .spawn()
            .expect("pvmd can be run");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("a pipe"))
            .read_line(&mut line)
            .expect("readable");
        self.master_process = Some(child);
        assert!(!line.is_empty(), "the master ended without its line");
        PathBuf::from(line.trim_end())
    }

    fn master_pid(&self) -> i32 {
        i32::try_from(self.master_process.as_ref().expect("started").id()).expect("a pid")
    }

    fn signal_master(&self, signal: nix::sys::signal::Signal) {
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(self.master_pid()), signal)
            .expect("it is our child");
    }

    /// Waits until the master ends and returns its exit status. Panics after a time limit.
    fn wait_for_end(&mut self) -> std::process::ExitStatus {
        let mut child = self.master_process.take().expect("started");
        let mut exit_status = None;
        wait_until("the master ends", || {
            exit_status = child.try_wait().expect("our child");
            exit_status.is_some()
        });
        exit_status.expect("it has ended")
    }

    /// Returns the processes of this virtual machine: the processes whose environment contains the
    /// test's directory. Each entry is a process id and a command line.
    fn find_processes(&self) -> Vec<String> {
        let dir_text = self.dir.path().to_string_lossy().into_owned();
        let mut process_lines = Vec::new();
        for process in all_processes().expect("/proc").flatten() {
            let environ = process.environ().unwrap_or_default();
            let contains_dir = |value: &OsString| value.to_string_lossy().contains(&dir_text);
            if environ.values().any(contains_dir) {
                let command_line = process.cmdline().unwrap_or_default().join(" ");
                process_lines.push(format!("{} {command_line}", process.pid));
            }
        }
        process_lines
    }

    /// Returns the number of programs of this virtual machine. Processes that a tasker has prepared
    /// for future tasks are not counted.
    fn program_count(&self) -> usize {
        let command_lines: BTreeMap<String, String> = (self.find_processes().iter())
            .filter_map(|process_line| process_line.split_once(' '))
            .map(|(pid, command_line)| (pid.into(), command_line.into()))
            .collect();
        let parent_pid = |pid: &String| {
            let status = checkpoint::proc::status(pid.parse().expect("a number"));
            status.map(|status| status.ppid.to_string())
        };
        let is_copy = |pid: &String, command_line: &String| {
            parent_pid(pid)
                .is_some_and(|parent_pid| command_lines.get(&parent_pid) == Some(command_line))
        };
        command_lines
            .iter()
            .filter(|(pid, command_line)| !is_copy(pid, command_line))
            .count()
    }

    /// Waits until no process of the virtual machine is left. Panics if a process or a file
    /// remains.
    fn assert_clean(&self) {
        wait_until("no process is left", || self.find_processes().is_empty());
        for entry in fs::read_dir(self.dir.path())
            .expect("ours")
            .flatten()
            .filter(|e| e.path().is_dir())
        {
            let remaining_files: Vec<_> = fs::read_dir(entry.path())
                .expect("ours")
                .flatten()
                .map(|e| e.path())
                .collect();
            assert!(
                remaining_files.is_empty(),
                "left behind: {remaining_files:?}"
            );
        }
    }

    fn read_log(&self) -> String {
        fs::read_to_string(self.path(&format!("master/sempa-{}/pvm/pvml", nix::unistd::getuid())))
            .unwrap_or_default()
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!(
                "log of the master:\n{}\nprocesses: {:?}",
                self.read_log(),
                self.find_processes()
            );
        }
        if let Some(mut child) = self.master_process.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Waits until `is_met` returns true. Panics after [`WAIT_TIMEOUT`] with the text `condition`.
fn wait_until(condition: &str, mut is_met: impl FnMut() -> bool) {
    let started_at = Instant::now();
    while !is_met() {
        assert!(
            started_at.elapsed() < WAIT_TIMEOUT,
            "waited in vain: {condition}"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A task's end of the connection to the daemon.
struct Task {
    stream: UnixStream,
    decoder: FrameDecoder,
    request_count: u64,
    tid: Option<Tid>,
}

impl Task {
    fn connect(socket: &Path) -> Self {
        let stream = UnixStream::connect(socket).expect("the daemon listens");
        stream
            .set_read_timeout(Some(WAIT_TIMEOUT))
            .expect("a socket");
        Self {
            stream,
            decoder: FrameDecoder::new(),
            request_count: 0,
            tid: None,
        }
    }

    /// Connects as a new task, waits for the daemon's welcome and returns the task.
    fn connect_and_enroll(socket: &Path) -> Self {
        let mut task = Self::connect(socket);
        let pid = i32::try_from(std::process::id()).expect("a pid");
        let hello = Hello {
            magic: TASK_MAGIC,
            version: WIRE_VERSION,
            claim: Claim::NotSpawned,
            namespace_pid: pid,
            program: "a test".into(),
            on_daemon_exit: OnDaemonExit::FailCalls,
        };
        task.send_message(&ToDaemon::Hello(hello));
        match task.wait_for_message() {
            Some(ToTask::Welcome(welcome)) => task.tid = Some(welcome.tid),
            other_message => panic!("{other_message:?}"),
        }
        task
    }

    fn send_message(&mut self, message: &ToDaemon) {
        self.stream
            .write_all(&encode_control(message).expect("small"))
            .expect("the daemon reads");
    }

    /// Waits for the next message and returns the message; `None` at the end of the stream.
    fn wait_for_message(&mut self) -> Option<ToTask> {
        Some(self.wait_for_frame()?.decode_control().expect("a message"))
    }

    /// Waits for the next frame of any kind and returns the frame; `None` at the end of the stream.
    fn wait_for_frame(&mut self) -> Option<Frame> {
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

    /// Sends a fragment that is a complete message.
    fn send_fragment(&mut self, dst: Tid, seq: u64, payload: Bytes) {
        let kind = LinkKind::Data { is_last: true };
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

    /// Waits for the next fragment and returns its sequence number.
    fn wait_for_fragment(&mut self) -> u64 {
        let frame = self.wait_for_frame().expect("the daemon writes");
        frame.decode_link().expect("a fragment").seq
    }

    /// Sends messages in one write, with the descriptors attached to the first byte.
    fn send_with_descriptors(&mut self, messages: &[ToDaemon], descriptors: &[RawFd]) {
        let bytes: Vec<u8> = messages
            .iter()
            .flat_map(|m| encode_control(m).expect("small").to_vec())
            .collect();
        let control = [ControlMessage::ScmRights(descriptors)];
        let (fd, slices) = (self.stream.as_raw_fd(), [IoSlice::new(&bytes)]);
        let sent_bytes = sendmsg::<()>(fd, &slices, &control, MsgFlags::empty(), None)
            .expect("the daemon reads");
        assert_eq!(sent_bytes, bytes.len());
    }

    /// Waits for the next message. Returns the message and the files of the descriptors that are
    /// attached to the message.
    fn wait_for_message_with_files(&mut self) -> (ToTask, Vec<File>) {
        let (mut bytes, mut cmsg_buffer) = ([0; 4096], nix::cmsg_space!([RawFd; 8]));
        let mut slices = [IoSliceMut::new(&mut bytes)];
        let flags = MsgFlags::MSG_CMSG_CLOEXEC;
        let fd = self.stream.as_raw_fd();
        let received_message = recvmsg::<()>(fd, &mut slices, Some(&mut cmsg_buffer), flags)
            .expect("the daemon speaks");
        let mut files = Vec::new();
        for message in received_message.cmsgs().expect("whole") {
            let ControlMessageOwned::ScmRights(fds) = message else {
                panic!("{message:?}")
            };
            // Each file is opened again by its name under /proc, so that every descriptor has one
            // owner that closes it.
            files.extend(
                fds.iter()
                    .map(|fd| File::open(format!("/proc/self/fd/{fd}")).expect("open")),
            );
            fds.into_iter()
                .for_each(|fd| nix::unistd::close(fd).expect("ours"));
        }
        let length = received_message.bytes;
        self.decoder.push(&bytes[..length]);
        (self.wait_for_message().expect("a word"), files)
    }

    fn tid(&self) -> Tid {
        self.tid.expect("welcomed")
    }

    fn request_reply(&mut self, request: Request) -> Reply {
        self.request_count += 1;
        let id = RequestId(self.request_count);
        self.send_message(&ToDaemon::Request { id, request });
        loop {
            match self.wait_for_message() {
                Some(ToTask::Reply {
                    id: reply_id,
                    reply,
                }) if reply_id == id => return reply,
                Some(_) => {}
                None => panic!("the daemon closed the connection"),
            }
        }
    }

    fn add_hosts(&mut self, lines: &[&str]) -> Vec<Result<String, (PvmError, String)>> {
        let lines = lines.iter().map(|l| l.to_string()).collect();
        match self.request_reply(Request::AddHosts {
            host_file_lines: lines,
        }) {
            Reply::HostsAdded(host_results) => host_results
                .into_iter()
                .map(|a| a.result.map(|entry| entry.name).map_err(|e| (e, a.reason)))
                .collect(),
            reply => panic!("{reply:?}"),
        }
    }
}

fn output_texts(output: &Output) -> (String, String) {
    (
        String::from_utf8_lossy(&output.stdout).into_owned(),
        String::from_utf8_lossy(&output.stderr).into_owned(),
    )
}

/// The master prints the path of its socket. After SIGTERM no file of the master remains.
#[test]
fn master_prints_its_socket_and_leaves_no_file() {
    let mut vm = Vm::new();
    let socket = vm.start_master();
    assert_eq!(
        socket,
        vm.path(&format!(
            "master/sempa-{}/pvm/pvmd.sock",
            nix::unistd::getuid()
        ))
    );
    let task = Task::connect_and_enroll(&socket);
    vm.signal_master(nix::sys::signal::Signal::SIGTERM);
    assert!(vm.wait_for_end().success());
    drop(task);
    vm.assert_clean();
}

/// A second virtual machine of the same name is refused with one line.
#[test]
fn second_vm_of_the_same_name_is_refused() {
    let mut vm = Vm::new();
    let socket = vm.start_master();
    let output = vm.pvmd_command().output().expect("pvmd can be run");
    assert_eq!(output.status.code(), Some(1));
    let (stdout, stderr) = output_texts(&output);
    assert_eq!(
        (stdout.as_str(), stderr.lines().count()),
        ("", 1),
        "{stderr}"
    );
    let process_text = format!("process {}", vm.master_pid());
    for expected_text in [
        "a virtual machine named pvm of this user is running already",
        &process_text,
        "PVM_VMID",
    ] {
        assert!(stderr.contains(expected_text), "{stderr}");
    }
    Task::connect_and_enroll(&socket);
    vm.signal_master(nix::sys::signal::Signal::SIGINT);
    assert!(vm.wait_for_end().success());
    vm.assert_clean();
}

/// The next daemon removes the files of a daemon that was killed.
#[test]
fn start_repairs_files_of_a_killed_daemon() {
    let mut vm = Vm::new();
    let socket = vm.start_master();
    let dir = socket.parent().expect("a directory").to_path_buf();
    fs::create_dir(dir.join("images-9")).expect("ours");
    fs::write(dir.join("resume-9"), "token").expect("ours");
    vm.signal_master(nix::sys::signal::Signal::SIGKILL);
    vm.wait_for_end();
    assert!(socket.exists() && dir.join("pvmd.lock").exists());
    wait_until("its tasker ends with it", || vm.find_processes().is_empty());
    assert_eq!(vm.start_master(), socket);
    assert!(!dir.join("images-9").exists() && !dir.join("resume-9").exists());
    Task::connect_and_enroll(&socket);
    // Another thread writes the log, so lines of the log may appear later than the replies.
    wait_until("the log says what was found", || {
        vm.read_log().contains("ended without cleaning up")
    });
    vm.signal_master(nix::sys::signal::Signal::SIGTERM);
    assert!(vm.wait_for_end().success());
    vm.assert_clean();
}

/// A daemon that receives garbage on its socket and its UDP port still serves its tasks.
#[test]
fn daemon_survives_garbage_on_socket_and_port() {
    let mut vm = Vm::new();
    let socket = vm.start_master();
    let mut valid_task = Task::connect_and_enroll(&socket);
    for garbage in [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        &[0xff; 5000],
        &[9, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8],
    ] {
        let mut invalid_task = Task::connect(&socket);
        let _ = invalid_task.stream.write_all(garbage);
        let reply = invalid_task.wait_for_message();
        assert!(
            matches!(reply, Some(ToTask::Refused { .. }) | None),
            "{reply:?}"
        );
        // Garbage is also sent after a valid hello.
        let mut invalid_task = Task::connect_and_enroll(&socket);
        let _ = invalid_task.stream.write_all(garbage);
        wait_until("it is cut off", || {
            invalid_task.wait_for_message().is_none()
        });
    }
    let mut old_task = Task::connect(&socket);
    let hello = Hello {
        magic: TASK_MAGIC,
        version: 999,
        claim: Claim::NotSpawned,
        namespace_pid: 1,
        program: String::new(),
        on_daemon_exit: OnDaemonExit::FailCalls,
    };
    old_task.send_message(&ToDaemon::Hello(hello));
    match old_task.wait_for_message() {
        Some(ToTask::Refused { reason }) => assert!(reason.contains("version 999"), "{reason}"),
        reply => panic!("{reply:?}"),
    }
    let Reply::Hosts(table) = valid_task.request_reply(Request::Config) else {
        panic!("no host table")
    };
    let udp_socket = UdpSocket::bind("127.0.0.1:0").expect("a port");
    for datagram_bytes in [1, 20, 1200, 60_000] {
        for byte in [0u8, 0x40, 0xc3, 0xff] {
            udp_socket
                .send_to(&vec![byte; datagram_bytes], table.hosts[0].addresses[0])
                .expect("loopback");
        }
    }
    assert_eq!(valid_task.add_hosts(&["h2"]), [Ok("h2".to_string())]);
    let Reply::Hosts(_) = valid_task.request_reply(Request::Config) else {
        panic!("no host table")
    };
    vm.signal_master(nix::sys::signal::Signal::SIGTERM);
    assert!(vm.wait_for_end().success());
    vm.assert_clean();
}

/// Returns a file in memory with this content.
/// Name of the files of [`memory_file`].
const MEMORY_FILE_NAME: &str = "a test's";

fn memory_file(text: &str) -> OwnedFd {
    let memory_fd = memfd_create(MEMORY_FILE_NAME, MFdFlags::MFD_CLOEXEC).expect("memory");
    nix::unistd::write(&memory_fd, text.as_bytes()).expect("room");
    memory_fd
}

/// Returns the number of files of [`memory_file`] that the process `pid` has open.
fn memory_file_count(pid: i32) -> usize {
    let fds = Process::new(pid).and_then(|process| process.fd());
    let is_memory_file = |target: &FDTarget| match target {
        FDTarget::MemFD(name) => name.starts_with(MEMORY_FILE_NAME),
        _ => false,
    };
    fds.expect("a process of this test")
        .filter(|fd| fd.as_ref().is_ok_and(|fd| is_memory_file(&fd.target)))
        .count()
}

fn read_contents(files: Vec<File>) -> Vec<String> {
    let file_text = |mut file: File| {
        let mut text = String::new();
        file.read_to_string(&mut text).expect("a file");
        text
    };
    files.into_iter().map(file_text).collect()
}

fn ring_offer(receiver: Tid, id: u64) -> ToDaemon {
    ToDaemon::Route {
        receiver,
        message: RouteMsg::RingOffer {
            id: OfferId(id),
            slot: 0,
        },
    }
}

fn assert_hosts_reply(task: &mut Task) {
    let reply = task.wait_for_message();
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

/// Accepts a ring offer with one descriptor. Checks that the accepting message arrives together
/// with the descriptor.
fn assert_accept_arrives(accepter: &mut Task, offerer: &mut Task, id: OfferId) {
    let route_message = RouteMsg::RingAccept { id, slot: 7 };
    accepter.send_with_descriptors(
        &[ToDaemon::Route {
            receiver: offerer.tid(),
            message: route_message.clone(),
        }],
        &[memory_file("bell of b").as_raw_fd()],
    );
    let (accept_message, files) = offerer.wait_for_message_with_files();
    assert_eq!(
        accept_message,
        ToTask::Route {
            sender: accepter.tid(),
            same_host: true,
            message: route_message
        }
    );
    assert_eq!(read_contents(files), ["bell of b"]);
}

/// Descriptors arrive with their message. A message without its announced descriptors closes the
/// connection.
#[test]
fn missing_descriptor_closes_the_connection() {
    let mut vm = Vm::new();
    let socket = vm.start_master();
    let [mut sender, mut receiver] = [
        Task::connect_and_enroll(&socket),
        Task::connect_and_enroll(&socket),
    ];
    let [ring_memory, doorbell] = [memory_file("rings"), memory_file("bell")];
    let ring_fds = [ring_memory.as_raw_fd(), doorbell.as_raw_fd()];
    let own_pid = std::process::id().cast_signed();
    assert!(memory_file_count(own_pid) >= ring_fds.len());
    for id in 1..=50 {
        // One frame precedes the message with the descriptors and one frame follows it, as in the
        // writes of a busy library.
        sender.send_message(&ToDaemon::Request {
            id: RequestId(2 * id),
            request: Request::Config,
        });
        let second_request = ToDaemon::Request {
            id: RequestId(2 * id + 1),
            request: Request::Config,
        };
        sender.send_with_descriptors(&[ring_offer(receiver.tid(), id), second_request], &ring_fds);
        let (route_message, files) = receiver.wait_for_message_with_files();
        let expected_offer = RouteMsg::RingOffer {
            id: OfferId(id),
            slot: 0,
        };
        assert_eq!(
            route_message,
            ToTask::Route {
                sender: sender.tid(),
                same_host: true,
                message: expected_offer
            }
        );
        assert_eq!(read_contents(files), ["rings", "bell"]);
        for _ in 0..2 {
            assert_hosts_reply(&mut sender);
        }
        assert_accept_arrives(&mut receiver, &mut sender, OfferId(id));
    }
    let config_request = || ToDaemon::Request {
        id: RequestId(999),
        request: Request::Config,
    };
    let violations: [(&[ToDaemon], usize); 4] = [
        (&[ring_offer(receiver.tid(), 1)], 0),
        (&[ring_offer(receiver.tid(), 1)], 1),
        (&[ring_offer(receiver.tid(), 1)], 3),
        (&[config_request()], 1),
    ];
    for (messages, fd_count) in violations {
        let mut violating_task = Task::connect_and_enroll(&socket);
        violating_task.send_with_descriptors(messages, &vec![doorbell.as_raw_fd(); fd_count]);
        wait_until("it is cut off", || {
            violating_task.wait_for_message().is_none()
        });
    }
    drop(sender);
    let next_message = receiver.wait_for_message();
    assert!(
        matches!(next_message, Some(ToTask::PeerGone { .. })),
        "{next_message:?}"
    );
    wait_until("the passed descriptors are closed", || {
        memory_file_count(vm.master_pid()) == 0
    });
    vm.signal_master(nix::sys::signal::Signal::SIGTERM);
    assert!(vm.wait_for_end().success());
    vm.assert_clean();
}

/// A task that does not read neither delays other tasks nor loses a message.
#[test]
fn task_that_does_not_read_loses_no_message() {
    let mut vm = Vm::new();
    let socket = vm.start_master();
    let (mut sender, mut idle_receiver, mut other_task) = (
        Task::connect_and_enroll(&socket),
        Task::connect_and_enroll(&socket),
        Task::connect_and_enroll(&socket),
    );
    // The frames are sent as a task sends its last messages: without a window and without
    // retransmission.
    let (payload, message_count) = (Bytes::from(vec![7; FRAGMENT_BYTES_MAX]), 2200);
    for seq in 1..=message_count {
        sender.send_fragment(idle_receiver.tid(), seq, payload.clone());
    }
    sender.send_fragment(other_task.tid(), 1, Bytes::new());
    assert_eq!(other_task.wait_for_fragment(), 1);
    sender
        .stream
        .shutdown(std::net::Shutdown::Both)
        .expect("a socket");
    for seq in 1..=message_count {
        assert_eq!(idle_receiver.wait_for_fragment(), seq);
    }
}

/// The remote shell adds hosts. Halt ends all daemons and tasks.
#[test]
fn remote_shell_adds_hosts_and_halt_ends_all() {
    let mut vm = Vm::new();
    let socket = vm.start_master();
    let mut task = Task::connect_and_enroll(&socket);
    let results = task.add_hosts(&[
        "h2",
        "h3 sp=2000",
        "nowhere",
        "closed",
        "bare",
        "h4 lo=somebody",
    ]);
    let names_or_errors: Vec<_> = results
        .iter()
        .map(|a| a.as_ref().map(String::as_str).map_err(|(e, _)| *e))
        .collect();
    let start_error = Err(PvmError::CantStart);
    assert_eq!(
        names_or_errors,
        [
            Ok("h2"),
            Ok("h3"),
            Err(PvmError::NoHost),
            start_error,
            start_error,
            Ok("h4")
        ],
        "{results:?}"
    );
    let reason = |n: usize| results[n].as_ref().expect_err("refused").1.clone();
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
    let Reply::Hosts(table) = task.request_reply(Request::Config) else {
        panic!("no host table")
    };
    assert_eq!(table.hosts.len(), 4);
    // A task on another host gets the host table with all hosts.
    let uid = nix::unistd::getuid();
    let h3_socket = vm.path(&format!("h3/sempa-{uid}/pvm/pvmd.sock"));
    let mut h3_task = Task::connect_and_enroll(&h3_socket);
    wait_until(
        "the table is known there",
        || matches!(h3_task.request_reply(Request::Config), Reply::Hosts(t) if t.hosts.len() == 4),
    );
    let duplicate_results = task.add_hosts(&["same1", "same2"]);
    let duplicate_refusal_count = duplicate_results
        .iter()
        .filter(|m| matches!(m, Err((PvmError::DupHost, _))))
        .count();
    assert_eq!(
        (
            duplicate_results.iter().filter(|m| m.is_ok()).count(),
            duplicate_refusal_count
        ),
        (1, 1),
        "{duplicate_results:?}"
    );
    assert!(vm.find_processes().len() >= 5, "{:?}", vm.find_processes());
    task.send_message(&ToDaemon::Request {
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
    let socket = vm.start_master();
    let mut task = Task::connect_and_enroll(&socket);
    assert_eq!(task.add_hosts(&["h2"]), [Ok("h2".to_string())]);
    vm.signal_master(nix::sys::signal::Signal::SIGKILL);
    vm.wait_for_end();
    wait_until("the slave ends too", || vm.find_processes().is_empty());
    assert_eq!(fs::read_dir(vm.path("h2")).expect("ours").count(), 0);
}

/// A slave that finds no master reports this with one line.
#[test]
fn slave_without_master_reports_it_in_one_line() {
    let vm = Vm::new();
    for input in ["", "hello\n", "{\"ddpro\":1}\n"] {
        let mut child = vm
            .pvmd_command()
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
        let (stdout, _) = output_texts(&output);
        assert_eq!(
            (output.status.code(), stdout.lines().count()),
            (Some(1), 1),
            "{stdout}"
        );
        assert!(stdout.starts_with("sempa-error: "), "{stdout}");
    }
    vm.assert_clean();
}

fn require_root() {
    assert!(
        nix::unistd::getuid().is_root(),
        "cannot run here: this needs root"
    );
}

/// A task of another user is refused; the refusal contains both uids.
#[test]
#[ignore = "system tier: needs root"]
fn other_user_is_refused_with_reason() {
    const NOBODY: u32 = 65_534;
    let mut vm = Vm::new();
    require_root();
    // The daemon belongs to the user `nobody`, and root is the other user, because apart from
    // `nobody` only root has access to the socket's directory.
    let program = vm.path("pvmd");
    fs::copy(env!("CARGO_BIN_EXE_pvmd"), &program).expect("writable");
    fs::set_permissions(vm.dir.path(), fs::Permissions::from_mode(0o755)).expect("ours");
    std::os::unix::fs::chown(vm.path("master"), Some(NOBODY), Some(NOBODY)).expect("root may");
    let mut command = Command::new(&program);
    let vm_command = vm.pvmd_command();
    command.env_clear().envs(
        vm_command
            .get_envs()
            .filter_map(|(name, value)| Some((name, value?))),
    );
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    std::os::unix::process::CommandExt::uid(&mut command, NOBODY);
    let mut child = command.spawn().expect("pvmd can be run");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("a pipe"))
        .read_line(&mut line)
        .expect("readable");
    vm.master_process = Some(child);
    match Task::connect(Path::new(line.trim_end())).wait_for_message() {
        Some(ToTask::Refused { reason }) => {
            assert!(
                reason.contains(&format!("serves user {NOBODY} only, and you are user 0")),
                "{reason}"
            );
        }
        answer => panic!("{answer:?}"),
    }
    vm.signal_master(nix::sys::signal::Signal::SIGTERM);
    assert!(vm.wait_for_end().success());
    vm.assert_clean();
}

/// Without `PVM_ALLOW_ROOT`, a master of root ends with one error line that contains this variable,
/// and leaves no file.
#[test]
#[ignore = "system tier: needs root"]
fn root_is_refused_without_permission() {
    let vm = Vm::new();
    require_root();
    let output = vm
        .pvmd_command()
        .env_remove("PVM_ALLOW_ROOT")
        .output()
        .expect("pvmd runs");
    let (stdout, stderr) = output_texts(&output);
    assert_eq!(
        (
            output.status.code(),
            stdout.as_str(),
            stderr.lines().count()
        ),
        (Some(1), "", 1),
        "{stderr}"
    );
    assert!(stderr.contains("PVM_ALLOW_ROOT"), "{stderr}");
    vm.assert_clean();
}

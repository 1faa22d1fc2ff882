//! Tests that messages arrive even if the kernel refuses system calls that rings and pools need.
//! The restrictions cannot be undone in a process, so each test starts a child process for them.
#![allow(unsafe_code)] // What a process forbids itself has no safe form.

use super::fake::FakeDaemon;
use super::rings::same_host_daemon;
use super::{expect_numbered, message, recv_next, send_numbered};
use crate::runtime::{EnrollOptions, Runtime};
use nix::sys::resource::{Resource, setrlimit};
use sempa_proto::Tid;
use sempa_proto::task::{Claim, OnDaemonExit};
use std::process::{Command, Stdio};

/// Size of a large message, above the minimum size for a lease.
const LARGE_BYTES: usize = 1 << 20;

/// Makes a system call fail with EPERM in this thread and the threads that it starts. If `second`
/// is given, only calls with this second argument fail.
fn forbid_syscall(call: libc::c_long, second: Option<u32>) {
    const fn bpf_instruction(code: u32, jump: u8, k: u32) -> libc::sock_filter {
        libc::sock_filter {
            code: code as u16,
            jt: 0,
            jf: jump,
            k,
        }
    }
    let (load, equal, answer) = (
        libc::BPF_LD | libc::BPF_W | libc::BPF_ABS,
        libc::BPF_JMP | libc::BPF_JEQ,
        libc::BPF_RET,
    );
    let mut instructions = vec![
        bpf_instruction(load, 0, 0),
        bpf_instruction(equal, if second.is_some() { 3 } else { 1 }, call as u32),
    ];
    if let Some(second) = second {
        // Offset of the second argument in `seccomp_data`: number, architecture, instruction
        // pointer and first argument come before it.
        instructions.extend([
            bpf_instruction(load, 0, 24),
            bpf_instruction(equal, 1, second),
        ]);
    }
    instructions.push(bpf_instruction(
        answer,
        0,
        libc::SECCOMP_RET_ERRNO | libc::EPERM as u32,
    ));
    instructions.push(bpf_instruction(answer, 0, libc::SECCOMP_RET_ALLOW));
    let program = libc::sock_fprog {
        len: instructions.len() as u16,
        filter: instructions.as_mut_ptr(),
    };
    // SAFETY: the kernel only reads the program, which lives through the call.
    let done = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1u64, 0u64, 0u64, 0u64) == 0
            && libc::prctl(
                libc::PR_SET_SECCOMP,
                u64::from(libc::SECCOMP_MODE_FILTER),
                &raw const program,
            ) == 0
    };
    assert!(done, "a filter: {}", std::io::Error::last_os_error());
}

/// Helper process of other tests: exchanges messages under a restriction.
#[test]
#[ignore = "child process of the tests of what is forbidden"]
fn child_goes_without() {
    let socket = std::env::var_os("WITHOUT_SOCKET")
        .expect("told where")
        .into();
    let peer: i32 = std::env::var("WITHOUT_TASK")
        .expect("told with whom")
        .parse()
        .expect("a number");
    let what = std::env::var("WITHOUT").expect("told what");
    match what.as_str() {
        "memory" => forbid_syscall(libc::SYS_memfd_create, None),
        "seals" => forbid_syscall(libc::SYS_fcntl, Some(libc::F_ADD_SEALS as u32)),
        bytes => {
            let bytes = bytes.parse().expect("a number of bytes");
            setrlimit(Resource::RLIMIT_FSIZE, bytes, bytes).expect("less is always allowed");
        }
    }
    let options = EnrollOptions {
        socket,
        claim: Claim::New,
        program: "without".into(),
        on_daemon_exit: OnDaemonExit::FailCalls,
    };
    let task = Runtime::connect(options).expect("welcome");
    let peer = Tid::from_raw(peer);
    task.send(message(peer, 0, "")).expect("sent");
    send_numbered(&task, peer, 0..300);
    expect_numbered(&task, peer, 0..300);
    for n in 0..20 {
        task.send(message(peer, n, vec![n as u8; LARGE_BYTES]))
            .expect("sent");
        let got = recv_next(&task);
        assert_eq!((got.tag, got.body.len()), (n, LARGE_BYTES));
        assert!(got.body.iter().all(|byte| *byte == n as u8), "whole");
    }
    let (has_ring, has_store) = task
        .with_core(|core| (core.shm.slot(peer).is_some(), core.shm.pool_id().is_some()))
        .expect("not forked");
    assert!(!has_store, "no room for one");
    assert!(
        !has_ring || what.parse::<u64>().is_ok(),
        "no memory to share"
    );
    assert!(has_ring || what != "2097152", "a ring is smaller");
    task.exit().expect("left");
}

fn exchange_restricted(what: &str) {
    let fake: FakeDaemon = same_host_daemon();
    let a = fake.enroll();
    let mut other = Command::new(std::env::current_exe().expect("known"))
        .args([
            "--exact",
            "runtime::tests::forbidden::child_goes_without",
            "--ignored",
        ])
        .envs([
            ("WITHOUT", what),
            ("WITHOUT_TASK", &a.tid().raw().to_string()),
        ])
        .env("WITHOUT_SOCKET", fake.socket())
        .stdout(Stdio::null())
        .spawn()
        .expect("started");
    let from = recv_next(&a).src;
    expect_numbered(&a, from, 0..300);
    send_numbered(&a, from, 0..300);
    for n in 0..20 {
        let got = recv_next(&a);
        assert_eq!((got.src, got.tag, got.body.len()), (from, n, LARGE_BYTES));
        a.send(message(from, n, got.body)).expect("sent");
    }
    assert!(other.wait().expect("it ends").success(), "without {what}");
}

/// Messages arrive if the kernel refuses to create shared memory.
#[test]
fn messages_arrive_without_shared_memory() {
    exchange_restricted("memory");
}

/// Messages arrive if the kernel refuses to seal memory.
#[test]
fn messages_arrive_without_seals() {
    exchange_restricted("seals");
}

/// Messages arrive, and no process is killed, under a file size limit below the size of a ring or a
/// pool.
#[test]
fn messages_arrive_under_file_size_limit() {
    // The first limit allows only a doorbell; the second allows a ring, too, but no pool.
    ["65536", "2097152"]
        .into_iter()
        .for_each(exchange_restricted);
}

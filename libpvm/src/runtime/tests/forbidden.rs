//! Tests that messages arrive even if the kernel refuses system calls that rings and pools need. A
//! process cannot remove the restrictions again, so each test starts a child process.
#![allow(unsafe_code)] // What a process forbids itself has no safe form.

use super::fake::FakeDaemon;
use super::rings::same_host_daemon;
use super::{recv_and_check_numbered, send_numbered, wait_for_next_message, xdr_message};
use crate::runtime::{EnrollOptions, Runtime};
use nix::sys::resource::{Resource, setrlimit};
use sempa_proto::Tid;
use sempa_proto::task::{Claim, OnDaemonExit};
use std::process::{Command, Stdio};

/// Size in bytes of a large message. The size exceeds the minimum size for a lease.
const LARGE_BODY_BYTES: usize = 1 << 20;

/// Makes the system call `syscall_number` fail with EPERM in this thread and the threads that this
/// thread starts. If `second_argument` is given, only calls with this second argument fail.
fn forbid_syscall(syscall_number: libc::c_long, second_argument: Option<u32>) {
    const fn bpf_instruction(code: u32, jump_if_false: u8, k: u32) -> libc::sock_filter {
        libc::sock_filter {
            code: code as u16,
            jt: 0,
            jf: jump_if_false,
            k,
        }
    }
    let (load_code, jump_equal_code, return_code) = (
        libc::BPF_LD | libc::BPF_W | libc::BPF_ABS,
        libc::BPF_JMP | libc::BPF_JEQ,
        libc::BPF_RET,
    );
    let mut instructions = vec![
        bpf_instruction(load_code, 0, 0),
        bpf_instruction(
            jump_equal_code,
            if second_argument.is_some() { 3 } else { 1 },
            syscall_number as u32,
        ),
    ];
    if let Some(second_argument) = second_argument {
        // Offset of the second argument in `seccomp_data`. The number, the architecture, the
        // instruction pointer and the first argument precede the second argument.
        instructions.extend([
            bpf_instruction(load_code, 0, 24),
            bpf_instruction(jump_equal_code, 1, second_argument),
        ]);
    }
    instructions.push(bpf_instruction(
        return_code,
        0,
        libc::SECCOMP_RET_ERRNO | libc::EPERM as u32,
    ));
    instructions.push(bpf_instruction(return_code, 0, libc::SECCOMP_RET_ALLOW));
    let program = libc::sock_fprog {
        len: instructions.len() as u16,
        filter: instructions.as_mut_ptr(),
    };
    // SAFETY: the kernel only reads the program, which exists until the call returns.
    let is_installed = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1u64, 0u64, 0u64, 0u64) == 0
            && libc::prctl(
                libc::PR_SET_SECCOMP,
                u64::from(libc::SECCOMP_MODE_FILTER),
                &raw const program,
            ) == 0
    };
    assert!(
        is_installed,
        "a filter: {}",
        std::io::Error::last_os_error()
    );
}

/// Helper process of other tests: exchanges messages under the restriction that the environment
/// names.
#[test]
#[ignore = "child process of the tests of what is forbidden"]
fn subprocess_exchanges_messages_under_restriction() {
    let socket = std::env::var_os("WITHOUT_SOCKET")
        .expect("told where")
        .into();
    let peer: i32 = std::env::var("WITHOUT_TASK")
        .expect("told with whom")
        .parse()
        .expect("a number");
    let restriction = std::env::var("WITHOUT").expect("told what");
    match restriction.as_str() {
        "memory" => forbid_syscall(libc::SYS_memfd_create, None),
        "seals" => forbid_syscall(libc::SYS_fcntl, Some(libc::F_ADD_SEALS as u32)),
        bytes => {
            let bytes = bytes.parse().expect("a number of bytes");
            setrlimit(Resource::RLIMIT_FSIZE, bytes, bytes).expect("less is always allowed");
        }
    }
    let options = EnrollOptions {
        socket,
        claim: Claim::NotSpawned,
        program: "without".into(),
        on_daemon_exit: OnDaemonExit::FailCalls,
        has_automatic_routes: false,
    };
    let task = Runtime::connect(options).expect("welcome");
    let peer = Tid::from_raw(peer);
    task.send(xdr_message(peer, 0, "")).expect("sent");
    send_numbered(&task, peer, 0..300);
    recv_and_check_numbered(&task, peer, 0..300);
    for n in 0..20 {
        task.send(xdr_message(peer, n, vec![n as u8; LARGE_BODY_BYTES]))
            .expect("sent");
        let message = wait_for_next_message(&task);
        assert_eq!((message.tag, message.body.len()), (n, LARGE_BODY_BYTES));
        assert!(message.body.iter().all(|byte| *byte == n as u8), "whole");
    }
    let (has_ring, has_pool) = task
        .with_core(|core| {
            (
                core.shm_routes.slot(peer).is_some(),
                core.shm_routes.pool_id().is_some(),
            )
        })
        .expect("not forked");
    assert!(!has_pool, "no room for one");
    assert!(
        !has_ring || restriction.parse::<u64>().is_ok(),
        "no memory to share"
    );
    assert!(has_ring || restriction != "2097152", "a ring is smaller");
    task.exit().expect("left");
}

fn exchange_restricted(restriction: &str) {
    let fake: FakeDaemon = same_host_daemon();
    let a = fake.enroll();
    let mut child = Command::new(std::env::current_exe().expect("known"))
        .args([
            "--exact",
            "runtime::tests::forbidden::subprocess_exchanges_messages_under_restriction",
            "--ignored",
        ])
        .envs([
            ("WITHOUT", restriction),
            ("WITHOUT_TASK", &a.tid().raw().to_string()),
        ])
        .env("WITHOUT_SOCKET", fake.socket_path())
        .stdout(Stdio::null())
        .spawn()
        .expect("started");
    let child_tid = wait_for_next_message(&a).src;
    recv_and_check_numbered(&a, child_tid, 0..300);
    send_numbered(&a, child_tid, 0..300);
    for n in 0..20 {
        let message = wait_for_next_message(&a);
        assert_eq!(
            (message.src, message.tag, message.body.len()),
            (child_tid, n, LARGE_BODY_BYTES)
        );
        a.send(xdr_message(child_tid, n, message.body))
            .expect("sent");
    }
    assert!(
        child.wait().expect("it ends").success(),
        "without {restriction}"
    );
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

/// Messages arrive under a file size limit below the size of a ring or a pool. The limit kills no
/// process.
#[test]
fn messages_arrive_under_file_size_limit() {
    // The first limit, in bytes, allows only a doorbell. The second limit allows a ring, too, but
    // no pool.
    ["65536", "2097152"]
        .into_iter()
        .for_each(exchange_restricted);
}

//! An ordinary user whose tasks CRIU cannot migrate, for lack of the tasker service, is told so in
//! one line by `start`, `conf` and `can-migrate`. Everything else works.

use sempa_proto::tasker_service::{
    self, PROTOCOL_VERSION, SOCKET_PATH, ServiceRefusal, ServiceReply, ServiceRequest,
};
use sempa_tests::requirements::require_testbed;
use sempa_tests::tasker_service::TaskerServices;
use sempa_tests::testbed::{ALICE, Account, Host, ROOT};
use sempa_tests::vm::VmSettings;
use sempa_tests::{OrPanicWithLogs, Testbed, Vm};
use std::fs::{self, Permissions};
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::thread;

const LINE_START: &str = "tasks cannot be migrated by CRIU on ";
/// Capabilities that a container has without special permission.
const CONTAINER_CAPABILITIES: &str = "-all,+chown,+dac_override,+fowner,+fsetid,+kill,+setgid,+setuid,+setpcap,\
                                      +net_bind_service,+net_raw,+sys_chroot,+mknod,+audit_write,+setfcap";

fn start_services<'a>(testbed: &'a Testbed, wrapper: &[&str]) -> TaskerServices<'a> {
    let key_dir = Path::new(env!("CARGO_TARGET_TMPDIR"));
    TaskerServices::start_wrapped(testbed, key_dir, wrapper).expect("the services")
}

fn note_lines(stderr: &str) -> Vec<&str> {
    let lines = stderr.lines();
    lines.filter(|line| line.starts_with(LINE_START)).collect()
}

/// Starts a virtual machine of `user` on h1 and h2 with a running task. Asserts what `start`,
/// `conf` and `can-migrate` say of the hosts: a line for h1 and h2 with each text in `expected`, or
/// nothing if `expected` is empty.
fn check_notes(testbed: &Testbed, user: Account, expected: &[&str]) {
    let (vm, start_output) =
        Vm::start_as(testbed, user, VmSettings::default()).expect("a virtual machine");
    vm.add_hosts(&["h2"]).or_panic_with_logs(&vm);
    let assert_note = |command: &str, hosts: &str, stderr: &str| {
        let line_start = format!("{LINE_START}{hosts}: ");
        let is_right = match note_lines(stderr)[..] {
            [] => expected.is_empty(),
            [line] => {
                !expected.is_empty()
                    && line.starts_with(&line_start)
                    && expected.iter().all(|text| line.contains(text))
            }
            _ => false,
        };
        assert!(
            is_right,
            "{command}: {stderr}, not {expected:?}\n{}",
            vm.events_and_logs()
        );
    };
    assert_note("start", "h1", &start_output.stderr);
    let conf_output = vm.run_pvm(&["conf"]).or_panic_with_logs(&vm);
    assert_note("conf", "h1, h2", &conf_output.stderr);
    assert_eq!(conf_output.stdout.lines().count(), 4, "{conf_output:?}");
    vm.compile_program("hold").expect("gcc");
    let tid = vm
        .spawn_connected(&["-h2", "hold", "1"])
        .or_panic_with_logs(&vm);
    let query = vm.run_pvm(&["can-migrate", &tid]).or_panic_with_logs(&vm);
    assert_eq!(query.succeeded(), expected.is_empty(), "{query:?}");
    assert_note("can-migrate", "h1, h2", &query.stderr);
    sempa_tests::hold_tasks::check_memory(&vm, &tid);
    vm.halt_and_wait().expect("halts");
}

/// Without the service, an ordinary user is told how the administrator adds it; root is not.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn missing_service_is_named() {
    let testbed = require_testbed(2);
    let expected = [
        "does not run there",
        "'systemctl enable --now sempa-taskerd.socket'",
    ];
    check_notes(&testbed, ALICE, &expected);
    check_notes(&testbed, ROOT, &[]);
    // What remains of a killed service is a socket at which nobody listens.
    drop(start_services(&testbed, &[]));
    assert!(testbed.host(1).machine_path(SOCKET_PATH).exists());
    check_notes(&testbed, ALICE, &expected);
    for host in testbed.hosts() {
        fs::remove_file(host.machine_path(SOCKET_PATH)).expect("it remains");
    }
    let _services = start_services(&testbed, &[]);
    check_notes(&testbed, ALICE, &[]);
    check_notes(&testbed, ROOT, &[]);
}

/// Answers each request to the socket of the service on `host` as a service of another version
/// does.
fn imitate_other_version(host: &Host, service_protocol: u32) {
    let path = host.machine_path(SOCKET_PATH);
    fs::create_dir_all(path.parent().expect("a folder")).expect("made");
    // The socket of an earlier imitation may remain.
    let _ = fs::remove_file(&path);
    let listener = UnixListener::bind(&path).expect("a socket");
    fs::set_permissions(&path, Permissions::from_mode(0o666)).expect("ours");
    thread::spawn(move || {
        for mut connection in listener.incoming().flatten() {
            let mut bytes = Vec::new();
            let mut buffer = [0; 256];
            while let Ok(None) = tasker_service::decode::<ServiceRequest>(&bytes) {
                match connection.read(&mut buffer) {
                    Ok(0) | Err(_) => break,
                    Ok(length) => bytes.extend(&buffer[..length]),
                }
            }
            let reply = ServiceReply::Refused(ServiceRefusal::OtherVersion {
                service: format!("{service_protocol}.7.0"),
                service_protocol,
                daemon: "0.1.0".into(),
                daemon_protocol: PROTOCOL_VERSION,
            });
            // The daemon has a time limit of its own.
            let _ = connection.write_all(&tasker_service::encode(&reply));
        }
    });
}

/// A service of an older or newer version is named with both versions.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn service_of_other_version_is_named() {
    let testbed = require_testbed(2);
    for protocol in [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1] {
        for host in testbed.hosts() {
            imitate_other_version(host, protocol);
        }
        let version = format!("has version {protocol}.7.0 (protocol {protocol})");
        let expected = [&*version, "installs the same version of both"];
        check_notes(&testbed, ALICE, &expected);
    }
}

/// In an unprivileged container the service runs tasks, and the capabilities that it lacks are
/// named.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn service_in_a_container_is_named() {
    let testbed = require_testbed(2);
    let wrapper = ["setpriv", "--bounding-set", CONTAINER_CAPABILITIES, "--"];
    let _services = start_services(&testbed, &wrapper);
    let expected = ["runs there without CAP_", "CAP_SYS_PTRACE", "CAP_SYS_ADMIN"];
    check_notes(&testbed, ALICE, &expected);
}

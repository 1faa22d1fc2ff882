use super::*;
use crate::doctor::facts::{CgroupFacts, EngineFacts, SocketFacts, UdpFacts};

const VERSION: &str = "1.2.3";

/// Returns the facts of a machine with everything that Sempa can use.
fn good_host() -> HostFacts {
    HostFacts {
        version: VERSION.into(),
        is_root: true,
        engine: EngineFacts {
            program: Ok("/opt/criu".into()),
            version: Ok("4.2".into()),
            trial: Check::Works,
        },
        namespaces: Check::Works,
        proc_mount: Check::Works,
        last_pid: Check::Works,
        enter_namespaces: Check::Works,
        userfaultfd: Check::Works,
        page_scan: Check::Works,
        has_sys_resource: true,
        ptrace_scope: Some(1),
        cgroups: CgroupFacts {
            mount: Some("/sys/fs/cgroup".into()),
            controllers: ["cpu", "memory", "pids"].map(String::from).into(),
            freezer: Check::Works,
        },
        settings: Ok("/etc/sempa/service.toml".into()),
        site_key: KeyFacts::Present("0123".into()),
        service: ServiceState::Answers {
            version: VERSION.into(),
            protocol: 1,
        },
        socket: Some(SocketFacts {
            path: "/run/s".into(),
            owner: 0,
            mode: 0o666,
        }),
        users: [("alice".to_string(), 1000), ("bob".to_string(), 1001)].into(),
    }
}

fn good_peer() -> PeerFacts {
    PeerFacts {
        version: Some(VERSION.into()),
        clock_offset_s: Some(-0.2),
        users: good_host().users,
        site_key: Some(Ok("0123".into())),
        udp: Some(UdpFacts {
            from_here: Check::Works,
            from_there: Check::Works,
        }),
    }
}

fn findings_of(host: HostFacts, peer: Option<Result<PeerFacts, String>>) -> Vec<Finding> {
    let peer = peer.map(|facts| Peer {
        name: "h2".into(),
        facts,
    });
    find(&Facts {
        host,
        peers: peer.into_iter().collect(),
    })
}

/// Returns the findings that are not ok, as "level subject: sentence".
fn problems(findings: &[Finding]) -> Vec<String> {
    let bad = findings.iter().filter(|finding| finding.level != Level::Ok);
    bad.map(|finding| {
        format!(
            "{:?} {}: {}",
            finding.level, finding.subject, finding.sentence
        )
    })
    .collect()
}

/// Asserts that exactly one finding is not ok, with this level and this part of the sentence.
fn assert_one_problem(findings: &[Finding], level: Level, part: &str) {
    let problems = problems(findings);
    assert_eq!(problems.len(), 1, "{problems:?}");
    assert!(
        problems[0].starts_with(&format!("{level:?} ")),
        "{problems:?}"
    );
    assert!(problems[0].contains(part), "{part}: {problems:?}");
}

#[test]
fn complete_machine_has_no_problem() {
    let findings = findings_of(good_host(), Some(Ok(good_peer())));
    assert_eq!(problems(&findings), [""; 0]);
    assert!(findings.len() > 20);
}

/// Each missing ability is one finding with what to do.
#[test]
fn each_missing_ability_is_one_finding() {
    let fails = || Check::Fails("EPERM".into());
    type Change = fn(&mut HostFacts, Check);
    let cases: [(Change, Level, &str); 8] = [
        (
            |h, c| h.engine.trial = c,
            Level::Failure,
            "CRIU: dump and restore",
        ),
        (
            |h, c| h.namespaces = c,
            Level::Failure,
            "cannot migrate by CRIU",
        ),
        (|h, c| h.proc_mount = c, Level::Failure, "mounting /proc"),
        (|h, c| h.last_pid = c, Level::Failure, "ns_last_pid"),
        (
            |h, c| h.enter_namespaces = c,
            Level::Failure,
            "entering the namespaces",
        ),
        (|h, c| h.userfaultfd = c, Level::Warning, "no post-copy"),
        (|h, c| h.page_scan = c, Level::Warning, "PAGEMAP_SCAN"),
        (
            |h, c| h.cgroups.freezer = c,
            Level::Warning,
            "stopped by signals",
        ),
    ];
    for (change, level, part) in cases {
        let mut host = good_host();
        change(&mut host, fails());
        let findings = findings_of(host, None);
        assert_one_problem(&findings, level, part);
        assert!(problems(&findings)[0].contains("EPERM"));
        // A property that could not be tested is never a failure.
        let mut host = good_host();
        change(&mut host, Check::NotTested("no".into()));
        assert_one_problem(
            &findings_of(host, None),
            Level::Warning,
            "was not tested: no",
        );
    }
}

type HostChange = fn(&mut HostFacts);

/// Asserts that each change of a good machine leads to one finding, with what to do.
fn assert_judged(cases: &[(HostChange, Level, &str)]) {
    for (change, level, part) in cases {
        let mut host = good_host();
        change(&mut host);
        let findings = findings_of(host, None);
        assert_one_problem(&findings, *level, part);
        let bad = findings.iter().find(|finding| finding.level != Level::Ok);
        let advice = bad.and_then(|finding| finding.advice.as_deref());
        assert!(advice.is_some_and(|advice| !advice.is_empty()), "{part}");
    }
}

#[test]
fn other_facts_of_the_machine_are_judged() {
    assert_judged(&[
        (|h| h.is_root = false, Level::Warning, "you are not root"),
        (
            |h| h.engine.version = Err("crash".into()),
            Level::Failure,
            "/opt/criu does not run: crash",
        ),
        (
            |h| h.has_sys_resource = false,
            Level::Warning,
            "no CAP_SYS_RESOURCE",
        ),
        (
            |h| h.ptrace_scope = Some(3),
            Level::Failure,
            "ptrace_scope = 3",
        ),
        (
            |h| h.cgroups.mount = None,
            Level::Warning,
            "version 2 is not mounted",
        ),
        (
            |h| h.cgroups.controllers.clear(),
            Level::Warning,
            "no controller memory and pids",
        ),
        (
            |h| h.engine.program = Err("no CRIU".into()),
            Level::Failure,
            "no CRIU",
        ),
        (
            |h| h.cgroups.controllers.retain(|c| c != "pids"),
            Level::Warning,
            "no controller pids",
        ),
    ]);
    let mut host = good_host();
    host.ptrace_scope = Some(2);
    assert_eq!(problems(&findings_of(host, None)), [""; 0]);
}

#[test]
fn facts_of_the_service_are_judged() {
    assert_judged(&[
        (
            |h| h.settings = Err("x, line 3: no".into()),
            Level::Failure,
            "x, line 3: no",
        ),
        (
            |h| h.site_key = KeyFacts::Refused("none".into()),
            Level::Failure,
            "none",
        ),
        (
            |h| h.site_key = KeyFacts::NotReadable,
            Level::Warning,
            "only root",
        ),
        (
            |h| h.service = ServiceState::Absent,
            Level::Failure,
            "does not run",
        ),
        (
            |h| h.service = ServiceState::SwitchedOff,
            Level::Warning,
            "SEMPA_TASKERD",
        ),
        (
            |h| {
                h.service = ServiceState::Failed {
                    why: "silent".into(),
                }
            },
            Level::Failure,
            "fails: silent",
        ),
        (
            |h| {
                h.service = ServiceState::Answers {
                    version: "0".into(),
                    protocol: 1,
                }
            },
            Level::Warning,
            "has version 0",
        ),
        (
            |h| h.socket.as_mut().expect("one").owner = 5,
            Level::Failure,
            "belongs to user 5",
        ),
        (
            |h| h.socket.as_mut().expect("one").mode = 0o600,
            Level::Failure,
            "mode 0600",
        ),
    ]);
}

#[test]
fn other_hosts_are_judged() {
    type Change = fn(&mut PeerFacts);
    let cases: [(Change, Level, &str); 11] = [
        (
            |p| p.version = Some("0.1".into()),
            Level::Warning,
            "it has version 0.1",
        ),
        (
            |p| p.clock_offset_s = Some(90.4),
            Level::Warning,
            "90 s ahead",
        ),
        (
            |p| p.clock_offset_s = Some(-7.0),
            Level::Warning,
            "7 s behind",
        ),
        (
            |p| *p.users.get_mut("bob").expect("a user") = 5,
            Level::Failure,
            "bob (here 1001, there 5)",
        ),
        (
            |p| p.users.retain(|user, _| user != "alice"),
            Level::Warning,
            "no account there: alice",
        ),
        (
            |p| p.site_key = Some(Ok("4567".into())),
            Level::Failure,
            "the site key 4567",
        ),
        (
            |p| p.site_key = Some(Err("pvm-admin: there is no site key /x".into())),
            Level::Failure,
            "it has no site key",
        ),
        (
            |p| p.site_key = Some(Err("sudo: a password is required".into())),
            Level::Warning,
            "could not be compared: sudo",
        ),
        (
            |p| p.udp.as_mut().expect("tested").from_here = Check::Fails("silence".into()),
            Level::Failure,
            "a datagram to it does not work (silence)",
        ),
        (
            |p| p.udp.as_mut().expect("tested").from_there = Check::Fails("silence".into()),
            Level::Failure,
            "that is no answer does not work",
        ),
        (|p| p.udp = None, Level::Warning, "cannot be told"),
    ];
    for (change, level, part) in cases {
        let mut peer = good_peer();
        change(&mut peer);
        let findings = findings_of(good_host(), Some(Ok(peer)));
        assert_one_problem(&findings, level, part);
        assert!(problems(&findings)[0].contains(" h2: "));
    }
}

/// The command that must succeed is named if ssh fails, and nothing else is said about the host.
#[test]
fn unreachable_host_is_one_failure() {
    let findings = findings_of(
        good_host(),
        Some(Err("Permission denied (publickey).".into())),
    );
    assert_one_problem(&findings, Level::Failure, "Permission denied (publickey).");
    let advice = findings
        .iter()
        .find_map(|finding| finding.advice.as_deref());
    assert_eq!(
        advice,
        Some("make this command succeed: ssh -o BatchMode=yes h2 true")
    );
}

#[test]
fn host_without_the_program_is_reported_once() {
    let peer = PeerFacts {
        version: None,
        site_key: None,
        udp: None,
        ..good_peer()
    };
    let problems = problems(&findings_of(good_host(), Some(Ok(peer))));
    assert_eq!(problems.len(), 2, "{problems:?}");
    assert!(problems[0].contains("not installed there") && problems[1].contains("datagrams"));
}

#[test]
fn long_lists_of_users_are_shortened() {
    let names: Vec<String> = (0..NAMED_USERS_MAX + 3).map(|n| format!("u{n}")).collect();
    assert_eq!(name_list(&names[..2]), "u0, u1");
    assert!(name_list(&names).ends_with("u7 and 3 others"));
}

//! Tests of the sentences of events.

use super::*;

fn host(index: u16) -> HostId {
    HostId::new(index).expect("an index")
}

fn host_name(host: HostId) -> Option<&'static str> {
    [None, None, Some("leo"), Some("max")][usize::from(host.index())]
}

/// Host names replace host numbers in every part of an event's sentence.
#[test]
fn sentences_contain_host_names() {
    let reason = "zoe is logged in on host 2".to_string();
    let presence_event = EventKind::OwnerPresent {
        host: host(2),
        since: Micros(0),
        detected_at: Micros(0),
        why: reason,
    };
    assert_eq!(
        presence_event.with_host_names(host_name),
        "owner of leo present: zoe is logged in on leo"
    );
    let placement = EventKind::Placed {
        name: "x".into(),
        hosts: vec![host(1), host(3)],
        why: "first host 3".into(),
    };
    assert_eq!(
        placement.with_host_names(host_name),
        "x placed on 1 max: first max"
    );
    let host_loss = EventKind::HostGone {
        host: host(2),
        name: "leo".into(),
        why: "lost".into(),
        lost_tasks: LostTasks::default(),
    };
    assert_eq!(
        host_loss.with_host_names(host_name),
        "leo (host 2) is gone: lost"
    );
    let closing_event = EventKind::HostClosed {
        host: host(2),
        why: "the owner wants no guests always".into(),
    };
    assert_eq!(
        closing_event.with_host_names(host_name),
        "leo accepts no guests: the owner wants no guests always"
    );
    assert_eq!(
        EventKind::HostOpened { host: host(3) }.with_host_names(host_name),
        "max accepts guests again"
    );
    let unnamed_host = EventKind::HostVacated { host: host(1) };
    assert_eq!(
        unnamed_host.with_host_names(host_name),
        "host 1 is clean: no guest is left on it"
    );
}

/// A sentence never ends with an empty reason, whatever another program has supplied.
// tidy: long because the list has one event of each kind with a reason
#[test]
fn empty_reasons_are_not_printed() {
    let (host, job) = (host(2), Tid::from_raw(0x40002));
    let why = String::new;
    let (name, checkpoint) = ("leo".to_string(), "a".to_string());
    let failure = |why| EventKind::MigrationFailed {
        id: MigrationId(1),
        tid: job,
        from: host,
        to: host,
        cause: MigrationCause::Owner { why: String::new() },
        step: Step::Dump,
        why,
    };
    let kinds = [
        EventKind::HostRefused {
            name: name.clone(),
            why: why(),
        },
        EventKind::HostGone {
            host,
            name: name.clone(),
            why: why(),
            lost_tasks: LostTasks::default(),
        },
        EventKind::Placed {
            name,
            hosts: vec![host],
            why: why(),
        },
        EventKind::OwnerPresent {
            host,
            since: Micros(0),
            detected_at: Micros(0),
            why: why(),
        },
        EventKind::OwnerAbsent { host, why: why() },
        EventKind::GuestsPaused {
            host,
            guests: vec![],
            duration: Micros(0),
            why: why(),
            leftovers: vec![],
        },
        EventKind::GuestsResumed {
            host,
            guests: vec![],
            why: why(),
        },
        EventKind::GuestsEnded {
            host,
            guests: vec![],
            why: why(),
        },
        EventKind::GuestsNotPaused {
            host,
            guests: vec![],
            why: why(),
        },
        EventKind::Suspended {
            tid: job,
            cause: suspend::SuspendCause::Preempted { why: why() },
        },
        EventKind::CheckpointFailed { job, why: why() },
        EventKind::Restarted {
            checkpoint: checkpoint.clone(),
            job,
            tasks: vec![(job, host)],
            why: why(),
        },
        EventKind::RestartFailed {
            checkpoint: checkpoint.clone(),
            cause: why(),
            why: why(),
        },
        EventKind::CheckpointsRemoved {
            checkpoints: vec![checkpoint.clone()],
            why: why(),
        },
        EventKind::CheckpointCopied {
            checkpoint: checkpoint.clone(),
            job,
            hosts: vec![],
            missing: 1,
            why: why(),
        },
        EventKind::CheckpointDamaged {
            checkpoint,
            job,
            why: why(),
            rolls_back: false,
            replacement: None,
        },
        EventKind::TaskerGone { host, why: why() },
        EventKind::HostClosed { host, why: why() },
        EventKind::Note { text: why() },
        failure(Failure::Refused(vec![])),
        failure(Failure::Engine(why())),
        failure(Failure::Images(why())),
        failure(Failure::Io(why())),
        failure(Failure::Cancelled(why())),
    ];
    for kind in kinds {
        let text = kind.to_string();
        assert!(
            !text.trim_end().ends_with(':')
                && !text.is_empty()
                && !text.contains("()")
                && !text.contains(": :")
                && !text.contains("  "),
            "{text:?} ({kind:?})"
        );
    }
}

/// The event of a lost host names the tasks that were lost with it.
#[test]
fn host_loss_names_lost_tasks() {
    let loss = |named: &[(i32, &str)], others| EventKind::HostGone {
        host: host(2),
        name: "leo".into(),
        why: "no packet for 10 s".into(),
        lost_tasks: LostTasks {
            named: named
                .iter()
                .map(|(tid, program)| (Tid::from_raw(*tid), program.to_string()))
                .collect(),
            others,
        },
    };
    assert_eq!(
        loss(&[(0x80001, "worker"), (0x80002, "solve")], 0).to_string(),
        "leo (host 2) is gone: no packet for 10 s; lost with it: t80001 worker, t80002 solve"
    );
    assert_eq!(
        loss(&[(0x80001, "worker")], 3).to_string(),
        "leo (host 2) is gone: no packet for 10 s; lost with it: t80001 worker and 3 more"
    );
}

/// The event that guests are paused also names ended tasks whose processes were stopped.
#[test]
fn pause_event_names_leftover_processes() {
    let (live, ended) = (Tid::from_raw(0x40002), Tid::from_raw(0x40003));
    let pause_text = |guests: &[Tid], leftovers: &[LeftoverCount]| {
        let event = EventKind::GuestsPaused {
            host: host(2),
            guests: guests.to_vec(),
            duration: Micros(5200),
            why: "olga is there".into(),
            leftovers: leftovers.to_vec(),
        };
        event.with_host_names(host_name)
    };
    let left = |processes| LeftoverCount {
        tid: ended,
        processes,
    };
    assert_eq!(
        pause_text(&[], &[]),
        "guests of leo paused: no guests within 5.2 ms: olga is there"
    );
    assert_eq!(
        pause_text(&[], &[left(1)]),
        "guests of leo paused: 1 process left by t40003 (ended) within 5.2 ms: olga is there"
    );
    assert_eq!(
        pause_text(&[live], &[left(2)]),
        "guests of leo paused: t40002, 2 processes left by t40003 (ended) within 5.2 ms: olga is there"
    );
    let left_event = EventKind::ProcessesLeft {
        host: host(2),
        left: left(2),
    };
    assert_eq!(
        left_event.with_host_names(host_name),
        "t40003 (ended) left 2 processes on leo, which remain guests"
    );
}

#[test]
fn text_that_resembles_a_host_is_not_replaced() {
    for text in [
        "a ghost 2",
        "host",
        "host 5000",
        "host x",
        "host 99999999999",
        "hosts 2 3",
        "the host  2",
    ] {
        assert_eq!(replace_host_numbers(text, |_| Some("leo")), text);
    }
    assert_eq!(
        replace_host_numbers("host 2, host 3.", host_name),
        "leo, max."
    );
    assert_eq!(
        replace_host_numbers("Zürich's host 2", host_name),
        "Zürich's leo"
    );
}

//! Spawns that wait for a long time while smaller spawns are placed before them.

use crate::common::{TestBed, client_tid, fake_vm, request, rm_tid};
use crate::{options_with_policy, query};
use bytes::Bytes;
use pvm_rm::decide::{RESERVATION_DELAY, TaskLimits};
use pvm_rm::policy::EffectivePolicy;
use pvm_rm::service::TAG_POLICY;
use pvm_rm::spawns::SpawnRules;
use sempa_proto::event::EventKind;
use sempa_proto::load::GuestLimits;
use sempa_proto::migration::Usage;
use sempa_proto::rm::{CTX_RM, HostState, RmQuery, RmReply};
use sempa_proto::task::SpawnRequest;
use sempa_proto::{Micros, PvmError, Tid};
use std::collections::VecDeque;

/// Two hosts with room for two tasks each, full of small tasks. A small task ends every ten
/// seconds; the next small task is requested shortly before.
struct BusyHosts {
    bed: TestBed,
    running_tids: VecDeque<Tid>,
    last_wait_id: i32,
    small_task_start_count: u32,
}

impl BusyHosts {
    fn new(limits: TaskLimits, guest_limits: GuestLimits) -> Self {
        let vm = fake_vm(2);
        vm.0.borrow_mut().guest_limits = guest_limits;
        let rules = SpawnRules {
            wait_max: Micros::from_secs(3600),
            task_limits: limits,
        };
        let bed = TestBed::start_with_options(
            &vm,
            options_with_policy(EffectivePolicy {
                spawn_rules: rules,
                preempts: false,
                ..EffectivePolicy::default()
            }),
        );
        let mut busy_hosts = Self {
            bed,
            running_tids: VecDeque::new(),
            last_wait_id: 1000,
            small_task_start_count: 0,
        };
        (0..4).for_each(|_| busy_hosts.request_small_task());
        assert_eq!(busy_hosts.running_tids.len(), 4);
        busy_hosts
    }

    fn request_small_task(&mut self) {
        self.last_wait_id += 1;
        self.bed
            .state()
            .request_spawn(self.last_wait_id, &request(1));
        self.bed.process_inbox();
        self.acknowledge_starts();
    }

    /// Acknowledges all orders to start tasks, and reports the starts.
    fn acknowledge_starts(&mut self) {
        let orders = self.bed.state().take_start_orders();
        for order in &orders {
            let tids = self.bed.state().acknowledge(order);
            for tid in &tids {
                let kind = EventKind::TaskStarted {
                    tid: *tid,
                    parent: client_tid(),
                    name: "worker".into(),
                    user: 0,
                };
                self.bed.state().log_event(order.host, kind);
            }
            if order.request.task_count == 1 {
                self.running_tids.extend(&tids);
                self.small_task_start_count += 1;
            }
        }
        self.bed.process_inbox();
    }

    /// Simulates ten seconds: a small task is requested, and then the oldest running one ends.
    fn advance_ten_seconds(&mut self) {
        self.request_small_task();
        if let Some(tid) = self.running_tids.pop_front() {
            let host = tid.birth_host().expect("a task");
            self.bed.state().log_event(
                host,
                EventKind::TaskEnded {
                    tid,
                    status: 0,
                    used: Usage::default(),
                },
            );
        }
        self.bed.report_absent_owners(&[1, 2]);
        self.acknowledge_starts();
        self.bed.advance(Micros::from_secs(10));
        self.acknowledge_starts();
    }
}

fn two_guests_per_host() -> GuestLimits {
    GuestLimits {
        guests_max: Some(2),
        ..GuestLimits::default()
    }
}

/// Asserts that the request `large_request` waits while small requests are placed, and is placed
/// after hosts have been reserved for it. `expected_note`: text of the log entry about the
/// reservation, which must occur exactly once.
fn assert_reservation(
    mut busy_hosts: BusyHosts,
    large_request: &SpawnRequest,
    expected_note: &str,
) {
    busy_hosts.bed.state().request_spawn(7, large_request);
    busy_hosts.bed.process_inbox();
    let starts_before = busy_hosts.small_task_start_count;
    for _ in 0..RESERVATION_DELAY.0 / 10_000_000 - 1 {
        busy_hosts.advance_ten_seconds();
    }
    assert_eq!(
        busy_hosts.bed.state().spawn_reply(7),
        None,
        "small ones always came first"
    );
    assert!(
        busy_hosts.small_task_start_count > starts_before + 5,
        "and they have got their places: {}",
        busy_hosts.small_task_start_count - starts_before
    );
    for _ in 0..8 {
        busy_hosts.advance_ten_seconds();
    }
    let reply = busy_hosts
        .bed
        .state()
        .spawn_reply(7)
        .unwrap_or_else(|| panic!("{:?}", busy_hosts.bed.state().recorded_notes()));
    assert!(reply.expect("good").iter().all(Result::is_ok));
    assert_eq!(
        busy_hosts
            .bed
            .state()
            .recorded_notes()
            .iter()
            .filter(|note| note.contains(expected_note))
            .count(),
        1,
        "said once"
    );
    let (starts_until_reply, last_wait_id) =
        (busy_hosts.small_task_start_count, busy_hosts.last_wait_id);
    for _ in 0..6 {
        busy_hosts.advance_ten_seconds();
    }
    assert!(
        busy_hosts.small_task_start_count > starts_until_reply
            && busy_hosts.last_wait_id > last_wait_id,
        "small ones go on"
    );
}

/// A spawn that needs a whole host is placed in the end, although small spawns use every slot that
/// becomes free.
#[test]
fn whole_host_is_reserved_for_long_waiting_spawn() {
    let large_request = SpawnRequest {
        where_arg: "?same-host".into(),
        ..request(2)
    };
    assert_reservation(
        BusyHosts::new(TaskLimits::default(), two_guests_per_host()),
        &large_request,
        "hosts are reserved for it",
    );
}

/// The reply to a query for a host states that the host is reserved for a spawn that has waited for
/// a long time.
#[test]
fn host_query_reports_reservation() {
    let mut busy_hosts = BusyHosts::new(TaskLimits::default(), two_guests_per_host());
    busy_hosts.bed.state().request_spawn(
        7,
        &SpawnRequest {
            where_arg: "?same-host".into(),
            ..request(2)
        },
    );
    busy_hosts.bed.process_inbox();
    let query_reservations = |busy_hosts: &mut BusyHosts| -> Vec<String> {
        let host_remarks =
            |host: &str| match query(&mut busy_hosts.bed, &RmQuery::HostDecisions(host.into())) {
                RmReply::Decisions {
                    host_state: Some(HostState::Used(remarks)),
                    ..
                } => remarks,
                // A full host is excluded, so its state contains no reservation.
                RmReply::Decisions {
                    host_state: Some(HostState::Excluded { .. }),
                    ..
                } => Vec::new(),
                other => panic!("{other:?}"),
            };
        ["h1", "h2"]
            .into_iter()
            .flat_map(host_remarks)
            .filter(|remarks| remarks.contains("reserved"))
            .collect()
    };
    assert_eq!(query_reservations(&mut busy_hosts), [""; 0]);
    let mut reported_remarks = Vec::new();
    for _ in 0..RESERVATION_DELAY.0 / 10_000_000 + 8 {
        busy_hosts.advance_ten_seconds();
        reported_remarks.extend(query_reservations(&mut busy_hosts));
    }
    let expected_remark = format!(
        "it is reserved for 2 worker for {}, which have waited long",
        client_tid()
    );
    assert!(
        !reported_remarks.is_empty()
            && reported_remarks.iter().all(|text| *text == expected_remark),
        "{reported_remarks:?}"
    );
    assert!(
        busy_hosts.bed.state().spawn_reply(7).is_some()
            && query_reservations(&mut busy_hosts).is_empty(),
        "it has its place"
    );
}

/// If a spawn waits because of its user's limit, later spawns of the user are not placed before it.
#[test]
fn limited_spawn_precedes_later_ones_of_user() {
    let limits = TaskLimits {
        user_tasks_max: Some(4),
        job_tasks_max: None,
    };
    assert_reservation(
        BusyHosts::new(limits, GuestLimits::default()),
        &request(3),
        "other requests of its user and its job wait for it",
    );
}

/// A spawn of more tasks than a limit could ever allow is refused immediately. It does not delay
/// other spawns.
#[test]
fn spawn_above_limit_is_refused_at_once() {
    let limits = TaskLimits {
        user_tasks_max: Some(4),
        job_tasks_max: None,
    };
    let mut busy_hosts = BusyHosts::new(limits, GuestLimits::default());
    busy_hosts.bed.state().request_spawn(7, &request(5));
    busy_hosts.bed.state().request_spawn(8, &request(3));
    busy_hosts.bed.process_inbox();
    assert_eq!(
        busy_hosts.bed.state().spawn_reply(7),
        Some(Ok(vec![Err(PvmError::OutOfRes); 5]))
    );
    let refusal_note = busy_hosts
        .bed
        .state()
        .recorded_notes()
        .pop()
        .expect("a note says why");
    assert!(
        refusal_note.contains(
            "the limit --user-tasks of the resource manager is 4, and the user has 4 tasks"
        ),
        "{refusal_note}"
    );
    // Three more tasks are allowed when two of the four have ended, or when the limit changes.
    assert_eq!(busy_hosts.bed.state().spawn_reply(8), None);
    for _ in 0..RESERVATION_DELAY.0 / 10_000_000 + 1 {
        busy_hosts.bed.report_absent_owners(&[1, 2]);
        busy_hosts.bed.advance(Micros::from_secs(10));
    }
    let notes = busy_hosts.bed.state().recorded_notes();
    assert!(
        notes
            .iter()
            .any(|note| note.contains("other requests of its user and its job wait for it")),
        "{notes:?}"
    );
    busy_hosts.bed.state().post_message(
        rm_tid(),
        CTX_RM,
        TAG_POLICY,
        0,
        Bytes::from_static(b"user_tasks = 2"),
    );
    busy_hosts.bed.process_inbox();
    assert_eq!(
        busy_hosts.bed.state().spawn_reply(8),
        Some(Ok(vec![Err(PvmError::OutOfRes); 3]))
    );
    let (ended_tids, starts_before) = (
        std::mem::take(&mut busy_hosts.running_tids),
        busy_hosts.small_task_start_count,
    );
    for tid in ended_tids {
        let host = tid.birth_host().expect("a task");
        busy_hosts.bed.state().log_event(
            host,
            EventKind::TaskEnded {
                tid,
                status: 0,
                used: Usage::default(),
            },
        );
    }
    busy_hosts.bed.process_inbox();
    busy_hosts.request_small_task();
    assert_eq!(
        busy_hosts.small_task_start_count,
        starts_before + 1,
        "later ones do not wait for it"
    );
}

/// No host is reserved for a spawn that needs more room than any host has.
#[test]
fn no_reservation_for_impossible_spawn() {
    let mut busy_hosts = BusyHosts::new(TaskLimits::default(), two_guests_per_host());
    busy_hosts.bed.state().request_spawn(
        7,
        &SpawnRequest {
            where_arg: "?same-host".into(),
            ..request(3)
        },
    );
    for _ in 0..RESERVATION_DELAY.0 / 10_000_000 + 6 {
        busy_hosts.advance_ten_seconds();
    }
    assert_eq!(busy_hosts.bed.state().spawn_reply(7), None);
    assert!(
        busy_hosts.small_task_start_count > 15,
        "the others go on: {}",
        busy_hosts.small_task_start_count
    );
    assert!(
        !busy_hosts
            .bed
            .state()
            .recorded_notes()
            .iter()
            .any(|note| note.contains("reserved for it"))
    );
}

/// Memory that was promised to a spawn is not promised again until load reports can include its
/// use.
#[test]
fn promised_memory_is_not_promised_twice() {
    let vm = fake_vm(1);
    vm.0.borrow_mut().available_bytes = 5 << 30;
    let mut bed = TestBed::start_with_watchers(&vm);
    let large_request = |count| SpawnRequest {
        where_arg: "?memory >= 2G".into(),
        ..request(count)
    };
    // Three requests arrive before the host has started any task.
    (1..=3).for_each(|wid| bed.state().request_spawn(wid, &large_request(1)));
    bed.process_inbox();
    let orders = bed.state().take_start_orders();
    assert_eq!(orders.len(), 2, "five gigabytes are enough for two");
    assert_eq!(
        bed.state().spawn_reply(3).expect("refused").expect("tried"),
        [Err(PvmError::OutOfRes)]
    );
    let notes = bed.state().recorded_notes();
    assert!(
        notes
            .iter()
            .any(|note| note.contains("memory >= 2G excludes h1 (1.0G)")),
        "{notes:?}"
    );
    orders
        .iter()
        .for_each(|order| drop(bed.state().acknowledge(order)));
    // This report may have been made before the tasks started, so the promise remains.
    bed.advance(Micros::from_secs(20));
    bed.report_absent_owners(&[1]);
    bed.state().request_spawn(4, &large_request(1));
    bed.process_inbox();
    assert!(bed.state().take_start_orders().is_empty());
    // The tasks have not used the memory. A report of this time would include the use of the
    // memory, so the promise ends.
    bed.advance(Micros::from_secs(11));
    bed.report_absent_owners(&[1]);
    bed.state().request_spawn(5, &large_request(2));
    bed.process_inbox();
    assert_eq!(bed.state().take_start_orders()[0].request.task_count, 2);
}

//! Decides whether guests may run, from the policy, the owner verdict, the available memory and the
//! local time. Pure.
//!
//! Guests must stop if the owner is present, or if the machine is closed to them. The machine is
//! closed if the policy is unknown, the user is blocked, the policy forbids guests at this time, or
//! less memory is available than the owner reserves. If the owner is present on a closed machine,
//! the time until eviction counts from the earlier of the two events.

use crate::hours::LocalTime;
use crate::policy::{LeaveAfter, Policy};
use sempa_proto::Micros;
use sempa_proto::load::{FREE_BYTES_PER_TASK_MIN, GuestLimits, OwnerVerdict};
use sempa_proto::owner::GuestAccess;
use serde::{Deserialize, Serialize};

/// The decision whether guests may run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestDecision {
    pub access: GuestAccess,
    /// The reason why guests must stop, in one sentence; empty if they may run.
    pub reason: String,
    /// Limits that apply to guests while they may run.
    pub limits: GuestLimits,
}

/// The inputs of the decision whether guests may run.
#[derive(Clone, Copy, Debug)]
pub struct GuestInputs<'a> {
    pub policy: &'a Policy,
    /// The reason why the administrator wants no guest on this machine; `None` if guests may come.
    pub drained: Option<&'a str>,
    /// The reason why the policy is unknown: a policy file is malformed and was never valid before.
    /// `None` if the policy is known.
    pub policy_unknown: Option<&'a str>,
    /// Uids of the users that the policy blocks.
    pub blocked_uids: &'a [u32],
    /// Uid of the user of the virtual machine.
    pub vm_uid: u32,
    pub owner_verdict: &'a OwnerVerdict,
    /// Reason for the owner verdict, in one sentence.
    pub owner_reason: &'a str,
    /// Available memory of the machine in bytes; 0 if unknown.
    pub available_bytes: u64,
    pub local_time: LocalTime,
    /// Time of the decision, in microseconds since 1970.
    pub now: Micros,
}

/// Memory in bytes that must be available in addition to the owner's reserve before guests may run
/// again after a shortage. This is the headroom that placement requires for one more task.
const REOPEN_HEADROOM_BYTES: u64 = FREE_BYTES_PER_TASK_MIN;
/// Minimum duration of a memory shortage. Without this minimum, guests would run again as soon as
/// the eviction of other guests has freed memory.
const SHORTAGE_DURATION_MIN: Micros = Micros::from_secs(30);

/// State from which the next decision continues: since when the machine is closed to guests and
/// since when memory is short.
#[derive(Debug, Default)]
pub struct GuestGate {
    /// Time since which the machine is closed to guests; `None` if it is open. The owner's presence
    /// alone does not close the machine.
    closed_since: Option<Micros>,
    /// Time since which less memory is available than the owner reserves; `None` if there is no
    /// shortage.
    memory_shortage_since: Option<Micros>,
}

/// Returns the reason why the machine is closed to guests; `None` if the machine is open. A
/// shortage of memory is not considered.
fn closing_reason(inputs: &GuestInputs<'_>) -> Option<String> {
    if let Some(reason) = inputs.drained {
        return Some(reason.to_string());
    }
    if let Some(reason) = inputs.policy_unknown {
        return Some(reason.to_string());
    }
    if inputs.blocked_uids.contains(&inputs.vm_uid) {
        return Some(format!("user {} is blocked here", inputs.vm_uid));
    }
    let forbidden_hours = inputs
        .policy
        .forbidden_hours
        .iter()
        .flatten()
        .find(|hours| hours.contains(inputs.local_time));
    if let Some(hours) = forbidden_hours {
        return Some(format!("the owner wants no guests {hours}"));
    }
    let allowed_hours = inputs
        .policy
        .allowed_hours
        .as_ref()
        .filter(|allowed_hours| {
            allowed_hours
                .iter()
                .all(|hours| !hours.contains(inputs.local_time))
        })?;
    let hour_texts: Vec<String> = allowed_hours
        .iter()
        .map(|hours| hours.to_string())
        .collect();
    Some(format!(
        "the owner wants guests only {}",
        if hour_texts.is_empty() {
            "never".into()
        } else {
            hour_texts.join(" and ")
        }
    ))
}

/// Returns the time since which less memory is available than the owner reserves; `None` if there
/// is no shortage. `previous_shortage_since` is the result of the previous call.
fn memory_shortage_since(
    previous_shortage_since: Option<Micros>,
    policy: &Policy,
    available_bytes: u64,
    now: Micros,
) -> Option<Micros> {
    let reserved_bytes = policy.memory_free.filter(|_| available_bytes > 0)?.0;
    let is_sufficient = match previous_shortage_since {
        Some(since) => {
            now.since(since) >= SHORTAGE_DURATION_MIN
                && available_bytes >= reserved_bytes.saturating_add(REOPEN_HEADROOM_BYTES)
        }
        None => available_bytes >= reserved_bytes,
    };
    (!is_sufficient).then(|| previous_shortage_since.unwrap_or(now))
}

impl GuestGate {
    /// True if a new decision is required at the time `now`, because a memory shortage begins or
    /// ends if `available_bytes` bytes are available.
    pub fn needs_decision(&self, policy: &Policy, available_bytes: u64, now: Micros) -> bool {
        memory_shortage_since(self.memory_shortage_since, policy, available_bytes, now).is_some()
            != self.memory_shortage_since.is_some()
    }

    /// Returns a new decision. Records since when the machine is closed and since when memory is
    /// short.
    pub fn decide(&mut self, inputs: &GuestInputs<'_>) -> GuestDecision {
        self.memory_shortage_since = memory_shortage_since(
            self.memory_shortage_since,
            inputs.policy,
            inputs.available_bytes,
            inputs.now,
        );
        let scarce_reserve = self.memory_shortage_since.and(inputs.policy.memory_free);
        let reason = closing_reason(inputs).or_else(|| {
            Some(format!(
                "less memory is free than the {} that the owner reserves",
                scarce_reserve?
            ))
        });
        self.closed_since = reason
            .as_ref()
            .map(|_| self.closed_since.unwrap_or(inputs.now));
        let owner_presence = match inputs.owner_verdict {
            OwnerVerdict::Present {
                detected_at: owner_presence,
                ..
            } => Some((*owner_presence, inputs.owner_reason.to_string())),
            _ => None,
        };
        let closed_since_and_reason = self.closed_since.zip(reason);
        // If the owner is present on a closed machine, the owner's presence is the reported reason.
        // The time until eviction counts from the earlier event.
        let stopped_since = owner_presence
            .iter()
            .chain(&closed_since_and_reason)
            .map(|(at, _)| *at)
            .min();
        let reason_of_drain = inputs.drained.unwrap_or_default().to_string();
        let (guest_access, stop_reason) =
            match (stopped_since, owner_presence.or(closed_since_and_reason)) {
                (Some(stopped_since), Some(_)) if inputs.drained.is_some() => (
                    drained_access(inputs.policy, stopped_since),
                    reason_of_drain,
                ),
                (Some(stopped_since), Some((_, stop_reason))) => {
                    (paused_access(inputs.policy, stopped_since), stop_reason)
                }
                _ => (GuestAccess::Welcome, String::new()),
            };
        let blocked_programs_and_users = inputs.policy.blocked.as_ref();
        let limits = GuestLimits {
            guests_max: inputs.policy.cores,
            other_guests: 0,
            free_memory_bytes: inputs.policy.memory_free.map_or(0, |size| size.0),
            blocked_programs: blocked_programs_and_users
                .and_then(|b| b.programs.clone())
                .unwrap_or_default(),
            blocked_users: inputs.blocked_uids.to_vec(),
        };
        GuestDecision {
            access: guest_access,
            reason: stop_reason,
            limits,
        }
    }
}

/// Returns the access of guests that must stop since the time `stopped_since`: paused, with the
/// eviction mode and, unless the policy forbids eviction, the eviction time.
fn paused_access(policy: &Policy, stopped_since: Micros) -> GuestAccess {
    let eviction_time = match policy.leave_after.unwrap_or(LeaveAfter::Seconds(0)) {
        LeaveAfter::Seconds(seconds) => Some(stopped_since + Micros::from_secs(seconds)),
        LeaveAfter::Never => None,
    };
    GuestAccess::Paused {
        evict_at: eviction_time,
        eviction: policy.eviction_mode.unwrap_or_default(),
    }
}

/// Returns the access of guests on a drained machine: they leave at once, whatever time the policy
/// gives guests of owners.
fn drained_access(policy: &Policy, stopped_since: Micros) -> GuestAccess {
    GuestAccess::Paused {
        evict_at: Some(stopped_since),
        eviction: policy.eviction_mode.unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use sempa_proto::owner::EvictionMode;

    const NOON: LocalTime = LocalTime {
        day: 0,
        minute: 720,
    };
    const ABSENT_OWNER: OwnerVerdict = OwnerVerdict::Absent { since: None };
    const PRESENT_OWNER: OwnerVerdict = OwnerVerdict::Present {
        since: Micros(1),
        detected_at: Micros(50_000_000),
    };

    fn parse_policy(text: &str) -> Policy {
        Policy::parse("test", text).expect("good")
    }

    fn decide(
        gate: &mut GuestGate,
        policy: &Policy,
        owner: &OwnerVerdict,
        local_time: LocalTime,
        now_s: u64,
    ) -> GuestDecision {
        let now = Micros::from_secs(now_s);
        let (policy_unknown, blocked_programs_and_users, stop_reason) =
            (None, &[9], "alice is here");
        gate.decide(&GuestInputs {
            policy,
            drained: None,
            policy_unknown,
            blocked_uids: blocked_programs_and_users,
            vm_uid: 7,
            owner_verdict: owner,
            owner_reason: stop_reason,
            available_bytes: 0,
            local_time,
            now,
        })
    }

    fn decide_once(policy_text: &str, owner: &OwnerVerdict, now_s: u64) -> GuestDecision {
        decide(
            &mut GuestGate::default(),
            &parse_policy(policy_text),
            owner,
            NOON,
            now_s,
        )
    }

    fn paused_until(eviction_time_s: Option<u64>, mode: EvictionMode) -> GuestAccess {
        GuestAccess::Paused {
            evict_at: eviction_time_s.map(Micros::from_secs),
            eviction: mode,
        }
    }

    /// With an empty policy, guests stop and are evicted immediately when the owner is present, and
    /// run otherwise.
    #[test]
    fn default_policy_evicts_guests_of_present_owner() {
        let present_decision = decide_once("", &PRESENT_OWNER, 60);
        assert_eq!(
            present_decision.access,
            paused_until(Some(50), EvictionMode::Move)
        );
        assert_eq!(present_decision.reason, "alice is here");
        let uncertain_owner = OwnerVerdict::Uncertain { since: Micros(1) };
        for owner in [ABSENT_OWNER, uncertain_owner] {
            assert_eq!(
                (
                    decide_once("", &owner, 60).access,
                    decide_once("", &owner, 60).reason.as_str()
                ),
                (GuestAccess::Welcome, "")
            );
        }
    }

    /// The policy determines the time until eviction and the eviction mode.
    #[test]
    fn leave_after_and_then_are_applied() {
        assert_eq!(
            decide_once("leave_after = 30", &PRESENT_OWNER, 60).access,
            paused_until(Some(80), EvictionMode::Move)
        );
        assert_eq!(
            decide_once("leave_after = \"never\"", &PRESENT_OWNER, 60).access,
            paused_until(None, EvictionMode::Move)
        );
        assert_eq!(
            decide_once("then = \"kill\"", &PRESENT_OWNER, 60).access,
            paused_until(Some(50), EvictionMode::Kill)
        );
    }

    /// Guests of a drained machine leave at once, whatever the owner's policy allows, and also if
    /// the owner is present for a shorter time.
    #[test]
    fn drained_machine_evicts_guests_at_once() {
        let policy = parse_policy("leave_after = \"never\"\nthen = \"kill\"");
        let mut gate = GuestGate::default();
        let mut decide_drained = |drained, now_s| {
            gate.decide(&GuestInputs {
                policy: &policy,
                drained,
                policy_unknown: None,
                blocked_uids: &[],
                vm_uid: 7,
                owner_verdict: &PRESENT_OWNER,
                owner_reason: "alice is here",
                available_bytes: 0,
                local_time: NOON,
                now: Micros::from_secs(now_s),
            })
        };
        let decision = decide_drained(Some("new disks"), 20);
        assert_eq!(decision.access, paused_until(Some(20), EvictionMode::Kill));
        assert_eq!(decision.reason, "new disks");
        let decision = decide_drained(None, 60);
        assert_eq!(decision.access, paused_until(None, EvictionMode::Kill));
    }

    /// At forbidden hours guests stop even if the owner is absent. The time until eviction counts
    /// from the start of these hours.
    #[test]
    fn forbidden_hours_stop_guests_from_their_start() {
        let policy = parse_policy("never = [\"mon 12-13\"]\nleave_after = 30");
        let mut gate = GuestGate::default();
        let minute_before_hours = LocalTime {
            day: 0,
            minute: 719,
        };
        assert_eq!(
            decide(&mut gate, &policy, &ABSENT_OWNER, minute_before_hours, 100).access,
            GuestAccess::Welcome
        );
        for seconds in [101, 120, 150] {
            let decision = decide(&mut gate, &policy, &ABSENT_OWNER, NOON, seconds);
            assert_eq!(decision.access, paused_until(Some(131), EvictionMode::Move));
            assert_eq!(decision.reason, "the owner wants no guests mon 12:00-13:00");
        }
        // The reported reason is the owner's presence, not the hours.
        assert_eq!(
            decide(&mut gate, &policy, &PRESENT_OWNER, NOON, 155).reason,
            "alice is here"
        );
        let end_of_hours = LocalTime {
            day: 0,
            minute: 780,
        };
        assert_eq!(
            decide(&mut gate, &policy, &ABSENT_OWNER, end_of_hours, 160).access,
            GuestAccess::Welcome
        );
        assert_eq!(
            decide(&mut gate, &policy, &ABSENT_OWNER, NOON, 170).access,
            paused_until(Some(200), EvictionMode::Move)
        );
    }

    #[test]
    fn guests_stop_outside_allowed_hours() {
        assert_eq!(
            decide_once("only = [\"mon 9-17\"]", &ABSENT_OWNER, 1).access,
            GuestAccess::Welcome
        );
        let decision = decide_once("only = [\"sat,sun\", \"22-6\"]", &ABSENT_OWNER, 1);
        assert_eq!(
            decision.reason,
            "the owner wants guests only sat-sun and 22:00-6:00"
        );
        assert_ne!(decision.access, GuestAccess::Welcome);
        assert_eq!(
            decide_once("only = []", &ABSENT_OWNER, 1).reason,
            "the owner wants guests only never"
        );
    }

    /// While the policy is unknown, guests stop as at forbidden hours.
    #[test]
    fn unknown_policy_stops_guests() {
        let (policy, mut gate) = (parse_policy("leave_after = 30"), GuestGate::default());
        let mut decide_at_second = |seconds: u64, unknown_reason, owner| {
            let (policy, now) = (&policy, Micros::from_secs(seconds));
            let presence_reason = "alice is here";
            gate.decide(&GuestInputs {
                policy,
                drained: None,
                policy_unknown: unknown_reason,
                blocked_uids: &[],
                vm_uid: 7,
                owner_verdict: owner,
                owner_reason: presence_reason,
                available_bytes: 0,
                local_time: NOON,
                now,
            })
        };
        let policy_error = Some("owner.toml, line 2: no");
        for seconds in [101, 120] {
            let decision = decide_at_second(seconds, policy_error, &ABSENT_OWNER);
            assert_eq!(decision.access, paused_until(Some(131), EvictionMode::Move));
            assert_eq!(decision.reason, "owner.toml, line 2: no");
        }
        assert_eq!(
            decide_at_second(140, policy_error, &PRESENT_OWNER).reason,
            "alice is here",
            "the better reason"
        );
        assert_eq!(
            decide_at_second(150, None, &ABSENT_OWNER).access,
            GuestAccess::Welcome
        );
    }

    /// Guests of a blocked user may never run. The decision also contains the limits for guests of
    /// other users.
    #[test]
    fn blocked_user_is_refused_and_limits_are_passed() {
        let mut gate = GuestGate::default();
        let policy = parse_policy("cores = 2\nmemory_free = \"1G\"\n[blocked]\nprograms = [\"x\"]");
        let decide = |gate: &mut GuestGate, vm_uid| {
            let now = Micros::from_secs(5);
            let (policy, unknown_reason, owner, available_bytes) =
                (&policy, None, &ABSENT_OWNER, 2 << 30);
            gate.decide(&GuestInputs {
                policy,
                drained: None,
                policy_unknown: unknown_reason,
                blocked_uids: &[9],
                vm_uid,
                owner_verdict: owner,
                owner_reason: "",
                available_bytes,
                local_time: NOON,
                now,
            })
        };
        assert_eq!(decide(&mut gate, 9).reason, "user 9 is blocked here");
        let admitted_decision = decide(&mut gate, 7);
        assert_eq!(admitted_decision.access, GuestAccess::Welcome);
        let expected_limits = GuestLimits {
            guests_max: Some(2),
            other_guests: 0,
            free_memory_bytes: 1 << 30,
            blocked_programs: vec!["x".into()],
            blocked_users: vec![9],
        };
        assert_eq!(admitted_decision.limits, expected_limits);
    }

    /// Guests stop when less memory is available than the owner reserves. They may run again when
    /// there is headroom for one more task and the shortage has lasted for the minimum time.
    #[test]
    fn short_memory_stops_guests_until_headroom_returns() {
        let (policy, mut gate) = (
            parse_policy("memory_free = \"1G\"\nleave_after = 5"),
            GuestGate::default(),
        );
        let mut decide_with_memory = |available_bytes: u64, seconds: u64| {
            let (owner, now) = (&ABSENT_OWNER, Micros::from_secs(seconds));
            let (policy, unknown_reason) = (&policy, None);
            let needs_decision = gate.needs_decision(policy, available_bytes, now);
            let inputs = GuestInputs {
                policy,
                drained: None,
                policy_unknown: unknown_reason,
                blocked_uids: &[],
                vm_uid: 7,
                owner_verdict: owner,
                owner_reason: "",
                available_bytes,
                local_time: NOON,
                now,
            };
            let decision = gate.decide(&inputs);
            assert!(
                !gate.needs_decision(policy, available_bytes, now),
                "it was decided"
            );
            (needs_decision, decision.access)
        };
        const GIB: u64 = 1 << 30;
        let paused_access = paused_until(Some(107), EvictionMode::Move);
        assert_eq!(
            decide_with_memory(0, 100),
            (false, GuestAccess::Welcome),
            "nobody knows"
        );
        assert_eq!(
            decide_with_memory(GIB, 101),
            (false, GuestAccess::Welcome),
            "that is enough"
        );
        assert_eq!(decide_with_memory(GIB - 1, 102), (true, paused_access));
        assert_eq!(
            decide_with_memory(2 * GIB, 103),
            (false, paused_access),
            "they went a moment ago"
        );
        assert_eq!(
            decide_with_memory(GIB + 1, 132),
            (false, paused_access),
            "not enough for one more"
        );
        assert_eq!(
            decide_with_memory(GIB + FREE_BYTES_PER_TASK_MIN, 133),
            (true, GuestAccess::Welcome)
        );
        assert_eq!(
            decide_with_memory(GIB - 1, 134),
            (true, paused_until(Some(139), EvictionMode::Move)),
            "its time starts again"
        );
        assert_eq!(
            decide_with_memory(0, 135),
            (true, GuestAccess::Welcome),
            "nobody knows any more"
        );
    }

    proptest! {
        /// The eviction time is never before the owner's arrival.
        #[test]
        fn present_owner_always_stops_guests(
            leave_after in prop::option::of(0_u64..100), day in 0_u8..7, minute in 0_u16..1440, is_present: bool, hours in 1_u16..24,
        ) {
            let leave_after = leave_after.map_or("\"never\"".to_string(), |s| s.to_string());
            let policy = parse_policy(&format!("never = [\"0-{hours}\"]\nleave_after = {leave_after}"));
            let owner = if is_present { PRESENT_OWNER } else { ABSENT_OWNER };
            let decision = decide(&mut GuestGate::default(), &policy, &owner, LocalTime { day, minute }, 60);
            let is_forbidden_hour = minute < hours * 60;
            prop_assert_eq!(decision.access != GuestAccess::Welcome, is_present || is_forbidden_hour);
            prop_assert_eq!(decision.reason.is_empty(), !is_present && !is_forbidden_hour);
            if let GuestAccess::Paused { evict_at: Some(at), .. } = decision.access {
                prop_assert!(at >= Micros::from_secs(50));
            }
        }
    }
}

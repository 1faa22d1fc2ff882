//! Decides whether guests may run, from the policy, the owner verdict, the available memory and the
//! local time. Pure.
//!
//! Guests must stop if the owner is present, or if the machine is closed to them. The machine is
//! closed if the policy is unknown, the user is blocked, the policy forbids guests at this time, or
//! less memory is available than the owner reserves. If both conditions hold, the time until
//! eviction counts from the earlier one.

use crate::hours::LocalTime;
use crate::policy::{LeaveAfter, Policy};
use sempa_proto::Micros;
use sempa_proto::load::{GuestLimits, HEADROOM_BYTES_PER_TASK, OwnerVerdict};
use sempa_proto::owner::GuestAccess;

/// The decision whether guests may run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GuestDecision {
    pub access: GuestAccess,
    /// The reason why guests must stop, in one sentence; empty if they may run.
    pub reason: String,
    /// Limits that apply to guests while they may run.
    pub limits: GuestLimits,
}

/// The inputs of a decision.
#[derive(Clone, Copy, Debug)]
pub struct GuestInputs<'a> {
    pub policy: &'a Policy,
    /// Why the policy is unknown: one of its files is malformed and had no valid content before.
    /// `None` if the policy is known.
    pub policy_unknown: Option<&'a str>,
    /// Uids of the users that the policy blocks.
    pub blocked_uids: &'a [u32],
    /// Uid of the user of the virtual machine.
    pub uid: u32,
    pub owner: &'a OwnerVerdict,
    /// Reason of the owner verdict.
    pub owner_reason: &'a str,
    /// Available memory of the machine in bytes; 0 if unknown.
    pub available_bytes: u64,
    pub local_time: LocalTime,
    /// Time of the decision, in microseconds since 1970.
    pub now: Micros,
}

/// Memory in addition to the owner's reserve that must be available before guests may run again
/// after a shortage. It is the headroom that placement requires for one more task.
const REOPEN_HEADROOM_BYTES: u64 = HEADROOM_BYTES_PER_TASK;
/// Minimum duration of a memory shortage. It prevents that the memory that evicted guests have
/// freed lets guests run again immediately.
const REOPEN_DELAY: Micros = Micros::from_secs(30);

/// State of the decision: the times at which the machine was closed to guests for a reason other
/// than a present owner.
#[derive(Debug, Default)]
pub struct GuestGate {
    closed_since: Option<Micros>,
    /// Time since which less memory is available than the owner reserves; `None` if there is no
    /// shortage.
    memory_short_since: Option<Micros>,
}

/// Returns the reason why the machine is closed to guests at this time, without regard to the
/// owner's presence and to memory; `None` if it is open.
fn closing_reason(case: &GuestInputs<'_>) -> Option<String> {
    if let Some(why) = case.policy_unknown {
        return Some(why.to_string());
    }
    if case.blocked_uids.contains(&case.uid) {
        return Some(format!("user {} is blocked here", case.uid));
    }
    let never = case
        .policy
        .forbidden_hours
        .iter()
        .flatten()
        .find(|hours| hours.contains(case.local_time));
    if let Some(hours) = never {
        return Some(format!("the owner wants no guests {hours}"));
    }
    let only = case
        .policy
        .allowed_hours
        .as_ref()
        .filter(|only| only.iter().all(|hours| !hours.contains(case.local_time)))?;
    let all: Vec<String> = only.iter().map(|hours| hours.to_string()).collect();
    Some(format!(
        "the owner wants guests only {}",
        if all.is_empty() {
            "never".into()
        } else {
            all.join(" and ")
        }
    ))
}

/// Returns the time since which less memory is available than the owner reserves; `None` if there
/// is no shortage. `before` is the previous result.
fn memory_short_since(
    before: Option<Micros>,
    policy: &Policy,
    available: u64,
    now: Micros,
) -> Option<Micros> {
    let keeps = policy.memory_free.filter(|_| available > 0)?.0;
    let enough = match before {
        Some(since) => {
            now.since(since) >= REOPEN_DELAY
                && available >= keeps.saturating_add(REOPEN_HEADROOM_BYTES)
        }
        None => available >= keeps,
    };
    (!enough).then(|| before.unwrap_or(now))
}

impl GuestGate {
    /// True if this amount of available memory requires a new decision.
    pub fn needs_decision(&self, policy: &Policy, available: u64, now: Micros) -> bool {
        memory_short_since(self.memory_short_since, policy, available, now).is_some()
            != self.memory_short_since.is_some()
    }

    /// Makes a new decision, and records the time since which the machine is closed.
    pub fn decide(&mut self, case: &GuestInputs<'_>) -> GuestDecision {
        self.memory_short_since = memory_short_since(
            self.memory_short_since,
            case.policy,
            case.available_bytes,
            case.now,
        );
        let short = self.memory_short_since.and(case.policy.memory_free);
        let reason = closing_reason(case).or_else(|| {
            Some(format!(
                "less memory was free than the {} that the owner keeps",
                short?
            ))
        });
        self.closed_since = reason
            .as_ref()
            .map(|_| self.closed_since.unwrap_or(case.now));
        let seen = match case.owner {
            OwnerVerdict::Present {
                detected_at: seen, ..
            } => Some((*seen, case.owner_reason.to_string())),
            _ => None,
        };
        let since = self.closed_since.zip(reason);
        // The reason that is reported is the owner's presence, if both reasons exist; the eviction
        // time counts from the earlier one.
        let from = seen.iter().chain(&since).map(|(at, _)| *at).min();
        let (guests, why) = match (from, seen.or(since)) {
            (Some(from), Some((_, why))) => (paused_access(case.policy, from), why),
            _ => (GuestAccess::Welcome, String::new()),
        };
        let blocked = case.policy.blocked.as_ref();
        let limits = GuestLimits {
            guests_max: case.policy.cores,
            memory_free: case.policy.memory_free.map_or(0, |size| size.0),
            programs: blocked.and_then(|b| b.programs.clone()).unwrap_or_default(),
            users: case.blocked_uids.to_vec(),
        };
        GuestDecision {
            access: guests,
            reason: why,
            limits,
        }
    }
}

fn paused_access(policy: &Policy, from: Micros) -> GuestAccess {
    let leave_at = match policy.leave_after.unwrap_or(LeaveAfter::Seconds(0)) {
        LeaveAfter::Seconds(seconds) => Some(from + Micros::from_secs(seconds)),
        LeaveAfter::Never => None,
    };
    GuestAccess::Paused {
        evict_at: leave_at,
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
    const ABSENT: OwnerVerdict = OwnerVerdict::Absent { since: None };
    const PRESENT: OwnerVerdict = OwnerVerdict::Present {
        since: Micros(1),
        detected_at: Micros(50_000_000),
    };

    fn parse(text: &str) -> Policy {
        Policy::parse("test", text).expect("good")
    }

    fn decide(
        door: &mut GuestGate,
        policy: &Policy,
        owner: &OwnerVerdict,
        wall: LocalTime,
        seconds: u64,
    ) -> GuestDecision {
        let now = Micros::from_secs(seconds);
        let (shut, blocked, why) = (None, &[9], "alice is here");
        door.decide(&GuestInputs {
            policy,
            policy_unknown: shut,
            blocked_uids: blocked,
            uid: 7,
            owner,
            owner_reason: why,
            available_bytes: 0,
            local_time: wall,
            now,
        })
    }

    fn decide_once(text: &str, owner: &OwnerVerdict, seconds: u64) -> GuestDecision {
        decide(
            &mut GuestGate::default(),
            &parse(text),
            owner,
            NOON,
            seconds,
        )
    }

    fn stopped_until(seconds: Option<u64>, then: EvictionMode) -> GuestAccess {
        GuestAccess::Paused {
            evict_at: seconds.map(Micros::from_secs),
            eviction: then,
        }
    }

    /// With an empty policy, guests stop and are evicted immediately when the owner is present, and
    /// run otherwise.
    #[test]
    fn default_policy_evicts_guests_of_present_owner() {
        let there = decide_once("", &PRESENT, 60);
        assert_eq!(there.access, stopped_until(Some(50), EvictionMode::Move));
        assert_eq!(there.reason, "alice is here");
        let maybe = OwnerVerdict::Maybe { since: Micros(1) };
        for owner in [ABSENT, maybe] {
            assert_eq!(
                (
                    decide_once("", &owner, 60).access,
                    decide_once("", &owner, 60).reason.as_str()
                ),
                (GuestAccess::Welcome, "")
            );
        }
    }

    /// Guests stay paused for `leave_after` and are then evicted in the way that the policy names.
    #[test]
    fn leave_after_and_then_are_applied() {
        assert_eq!(
            decide_once("leave_after = 30", &PRESENT, 60).access,
            stopped_until(Some(80), EvictionMode::Move)
        );
        assert_eq!(
            decide_once("leave_after = \"never\"", &PRESENT, 60).access,
            stopped_until(None, EvictionMode::Move)
        );
        assert_eq!(
            decide_once("then = \"kill\"", &PRESENT, 60).access,
            stopped_until(Some(50), EvictionMode::Kill)
        );
    }

    /// At forbidden hours guests stop even if the owner is absent. The time until eviction counts
    /// from the start of these hours.
    #[test]
    fn forbidden_hours_stop_guests_from_their_start() {
        let policy = parse("never = [\"mon 12-13\"]\nleave_after = 30");
        let mut door = GuestGate::default();
        let early = LocalTime {
            day: 0,
            minute: 719,
        };
        assert_eq!(
            decide(&mut door, &policy, &ABSENT, early, 100).access,
            GuestAccess::Welcome
        );
        for seconds in [101, 120, 150] {
            let closed = decide(&mut door, &policy, &ABSENT, NOON, seconds);
            assert_eq!(closed.access, stopped_until(Some(131), EvictionMode::Move));
            assert_eq!(closed.reason, "the owner wants no guests mon 12:00-13:00");
        }
        // The reported reason is the owner's presence, not the hours.
        assert_eq!(
            decide(&mut door, &policy, &PRESENT, NOON, 155).reason,
            "alice is here"
        );
        let late = LocalTime {
            day: 0,
            minute: 780,
        };
        assert_eq!(
            decide(&mut door, &policy, &ABSENT, late, 160).access,
            GuestAccess::Welcome
        );
        assert_eq!(
            decide(&mut door, &policy, &ABSENT, NOON, 170).access,
            stopped_until(Some(200), EvictionMode::Move)
        );
    }

    /// Outside the hours in `only`, guests stop.
    #[test]
    fn guests_stop_outside_allowed_hours() {
        assert_eq!(
            decide_once("only = [\"mon 9-17\"]", &ABSENT, 1).access,
            GuestAccess::Welcome
        );
        let closed = decide_once("only = [\"sat,sun\", \"22-6\"]", &ABSENT, 1);
        assert_eq!(
            closed.reason,
            "the owner wants guests only sat-sun and 22:00-6:00"
        );
        assert_ne!(closed.access, GuestAccess::Welcome);
        assert_eq!(
            decide_once("only = []", &ABSENT, 1).reason,
            "the owner wants guests only never"
        );
    }

    /// While the policy is unknown, guests stop as at forbidden hours.
    #[test]
    fn unknown_policy_stops_guests() {
        let (policy, mut door) = (parse("leave_after = 30"), GuestGate::default());
        let mut at = |seconds: u64, shut, owner| {
            let (policy, now) = (&policy, Micros::from_secs(seconds));
            let why = "alice is here";
            door.decide(&GuestInputs {
                policy,
                policy_unknown: shut,
                blocked_uids: &[],
                uid: 7,
                owner,
                owner_reason: why,
                available_bytes: 0,
                local_time: NOON,
                now,
            })
        };
        let wrong = Some("owner.toml:2: no");
        for seconds in [101, 120] {
            let decision = at(seconds, wrong, &ABSENT);
            assert_eq!(
                decision.access,
                stopped_until(Some(131), EvictionMode::Move)
            );
            assert_eq!(decision.reason, "owner.toml:2: no");
        }
        assert_eq!(
            at(140, wrong, &PRESENT).reason,
            "alice is here",
            "the better reason"
        );
        assert_eq!(at(150, None, &ABSENT).access, GuestAccess::Welcome);
    }

    /// Guests of a blocked user may never run; the decision also contains the limits for other
    /// guests.
    #[test]
    fn blocked_user_is_refused_and_limits_are_passed() {
        let mut door = GuestGate::default();
        let policy = parse("cores = 2\nmemory_free = \"1G\"\n[blocked]\nprograms = [\"x\"]");
        let decide = |door: &mut GuestGate, user| {
            let now = Micros::from_secs(5);
            let (policy, shut, owner, available) = (&policy, None, &ABSENT, 2 << 30);
            door.decide(&GuestInputs {
                policy,
                policy_unknown: shut,
                blocked_uids: &[9],
                uid: user,
                owner,
                owner_reason: "",
                available_bytes: available,
                local_time: NOON,
                now,
            })
        };
        assert_eq!(decide(&mut door, 9).reason, "user 9 is blocked here");
        let other = decide(&mut door, 7);
        assert_eq!(other.access, GuestAccess::Welcome);
        let limits = GuestLimits {
            guests_max: Some(2),
            memory_free: 1 << 30,
            programs: vec!["x".into()],
            users: vec![9],
        };
        assert_eq!(other.limits, limits);
    }

    /// Guests stop when less memory is available than the owner reserves. They may run again when
    /// there is headroom for one more task.
    #[test]
    fn short_memory_stops_guests_until_headroom_returns() {
        let (policy, mut door) = (
            parse("memory_free = \"1G\"\nleave_after = 5"),
            GuestGate::default(),
        );
        let mut seen = |available: u64, seconds: u64| {
            let (owner, now) = (&ABSENT, Micros::from_secs(seconds));
            let (policy, shut) = (&policy, None);
            let turns = door.needs_decision(policy, available, now);
            let case = GuestInputs {
                policy,
                policy_unknown: shut,
                blocked_uids: &[],
                uid: 7,
                owner,
                owner_reason: "",
                available_bytes: available,
                local_time: NOON,
                now,
            };
            let decision = door.decide(&case);
            assert!(
                !door.needs_decision(policy, available, now),
                "it was decided"
            );
            (turns, decision.access)
        };
        const G: u64 = 1 << 30;
        let stopped = stopped_until(Some(107), EvictionMode::Move);
        assert_eq!(seen(0, 100), (false, GuestAccess::Welcome), "nobody knows");
        assert_eq!(
            seen(G, 101),
            (false, GuestAccess::Welcome),
            "that is enough"
        );
        assert_eq!(seen(G - 1, 102), (true, stopped));
        assert_eq!(seen(2 * G, 103), (false, stopped), "they went a moment ago");
        assert_eq!(
            seen(G + 1, 132),
            (false, stopped),
            "not enough for one more"
        );
        assert_eq!(
            seen(G + HEADROOM_BYTES_PER_TASK, 133),
            (true, GuestAccess::Welcome)
        );
        assert_eq!(
            seen(G - 1, 134),
            (true, stopped_until(Some(139), EvictionMode::Move)),
            "it counts anew"
        );
        assert_eq!(
            seen(0, 135),
            (true, GuestAccess::Welcome),
            "nobody knows any more"
        );
    }

    proptest! {
        /// A present owner always stops guests, and the eviction time is never before the owner's
        /// arrival.
        #[test]
        fn present_owner_always_stops_guests(
            leave in prop::option::of(0_u64..100), day in 0_u8..7, minute in 0_u16..1440, there: bool, hours in 1_u16..24,
        ) {
            let leave = leave.map_or("\"never\"".to_string(), |s| s.to_string());
            let policy = parse(&format!("never = [\"0-{hours}\"]\nleave_after = {leave}"));
            let owner = if there { PRESENT } else { ABSENT };
            let decision = decide(&mut GuestGate::default(), &policy, &owner, LocalTime { day, minute }, 60);
            let closed = minute < hours * 60;
            prop_assert_eq!(decision.access != GuestAccess::Welcome, there || closed);
            prop_assert_eq!(decision.reason.is_empty(), !there && !closed);
            if let GuestAccess::Paused { evict_at: Some(at), .. } = decision.access {
                prop_assert!(at >= Micros::from_secs(50));
            }
        }
    }
}

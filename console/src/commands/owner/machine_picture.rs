//! The statements that the load watchers of all virtual machines of this machine have in common.
//!
//! With the tasker service, one load watcher observes the machine for all virtual machines. Their
//! answers then differ only in their guests, and in what a user has stated for an own virtual
//! machine.

use super::status::memory_text;
use pvm_load_watcher::status::{PolicySetting, WatcherStatus};
use serde_json::json;

/// The text of a policy without settings.
const NO_POLICY_TEXT: &str =
    "  policy    none: guests stop as soon as the owner is there, and leave if they can\n";

/// The lines about the owner that answers have in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct OwnerLines {
    /// The verdict, with its reason.
    owner: String,
    /// The policy and the clock to which it refers.
    policy: String,
    /// The errors in policies.
    wrong: String,
    /// The sources of the verdict.
    sources: String,
}

impl OwnerLines {
    pub(super) fn of(status: &WatcherStatus) -> Self {
        let WatcherStatus {
            owner,
            confidence,
            why,
            ..
        } = status;
        let wrong_lines = status.wrong.iter();
        let source_lines = status.sources.iter();
        Self {
            owner: format!("  owner     {owner}, {confidence} % sure: {why}\n"),
            policy: policy_text(status),
            wrong: wrong_lines
                .map(|line| format!("  wrong     {line}\n"))
                .collect(),
            sources: source_lines
                .map(|(name, text)| format!("  source    {name}: {text}\n"))
                .collect(),
        }
    }

    /// Returns the lines before the guests of a virtual machine, and those after the guests. Omits
    /// what the machine has in common.
    pub(super) fn without_common(&self, common: Option<&Self>) -> (String, String) {
        let Some(common) = common else {
            return (
                self.owner.clone(),
                format!("{}{}{}", self.policy, self.wrong, self.sources),
            );
        };
        let differing = |own: &String, common: &String| match own == common {
            true => String::new(),
            false => own.clone(),
        };
        let (before, mut after) = (
            differing(&self.owner, &common.owner),
            differing(&self.policy, &common.policy),
        );
        after += &differing(&self.wrong, &common.wrong);
        (before, after)
    }
}

fn policy_text(status: &WatcherStatus) -> String {
    if status.policy.is_empty() {
        return NO_POLICY_TEXT.into();
    }
    let line = |PolicySetting { name, value, from }: &PolicySetting| {
        format!("  policy    {name} = {value}  ({from})\n")
    };
    let mut out: String = status.policy.iter().map(line).collect();
    let has_hours = |setting: &PolicySetting| ["never", "only"].contains(&setting.name.as_str());
    if !status.clock.is_empty() && status.policy.iter().any(has_hours) {
        out.push_str(&format!(
            "  clock     {}: the hours above refer to it\n",
            status.clock
        ));
    }
    out
}

/// The picture of the machine that all virtual machines share.
#[derive(Clone, Debug)]
pub(super) struct MachinePicture<'a> {
    pub(super) lines: OwnerLines,
    /// An answer from the load watcher of the machine.
    shared: &'a WatcherStatus,
    guest_count: usize,
    memory_bytes: u64,
    machine_count: usize,
}

impl<'a> MachinePicture<'a> {
    /// Returns the picture; `None` if each virtual machine observes the machine itself.
    pub(super) fn of(statuses: &'a [WatcherStatus]) -> Option<Self> {
        let shared = statuses.iter().find(|status| status.machine_sense)?;
        let guests = statuses.iter().flat_map(|status| &status.tasks);
        Some(Self {
            lines: OwnerLines::of(shared),
            shared,
            guest_count: guests.clone().count(),
            memory_bytes: guests.map(|guest| guest.resident_bytes).sum(),
            machine_count: statuses.len(),
        })
    }

    pub(super) fn text(&self) -> String {
        let count = |number: usize, one: &str, many: &str| match number {
            1 => format!("1 {one}"),
            number => format!("{number} {many}"),
        };
        let OwnerLines {
            owner,
            policy,
            wrong,
            sources,
        } = &self.lines;
        format!(
            "this machine\n{owner}  in use    {} of {}, {} of memory\n{policy}{wrong}{sources}",
            count(self.guest_count, "guest", "guests"),
            count(self.machine_count, "virtual machine", "virtual machines"),
            memory_text(self.memory_bytes),
        )
    }

    pub(super) fn to_json(&self) -> serde_json::Value {
        let WatcherStatus {
            owner,
            confidence,
            why,
            ..
        } = self.shared;
        json!({
            "owner": owner,
            "confidence": confidence,
            "why": why,
            "guests": self.guest_count,
            "resident_bytes": self.memory_bytes,
            "virtual_machines": self.machine_count,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(user: &str) -> WatcherStatus {
        WatcherStatus {
            user: user.into(),
            owner: "absent".into(),
            confidence: 90,
            why: "no user is logged in".into(),
            sources: vec![("logins".into(), "0 logins".into())],
            machine_sense: true,
            ..WatcherStatus::default()
        }
    }

    /// The text of the machine contains the common lines; that of a virtual machine contains only
    /// lines that differ.
    #[test]
    fn common_lines_are_said_once() {
        let statuses = [status("alice"), status("bob")];
        let picture = MachinePicture::of(&statuses).expect("one load watcher");
        let text = picture.text();
        for part in [
            "this machine\n  owner     absent, 90 % sure: no user is logged in\n",
            "  in use    0 guests of 2 virtual machines, 0 MiB of memory\n",
            "policy    none",
            "source    logins: 0 logins\n",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let common = Some(&picture.lines);
        let own = OwnerLines::of(&statuses[1]).without_common(common);
        assert_eq!(own, (String::new(), String::new()));
        let present = WatcherStatus {
            owner: "present".into(),
            ..status("bob")
        };
        let (before, after) = OwnerLines::of(&present).without_common(common);
        assert!(before.contains("present, 90 % sure"), "{before}");
        assert_eq!(after, "");
    }

    /// Load watchers that observe the machine themselves have no common picture.
    #[test]
    fn own_observations_are_no_common_picture() {
        let alone = WatcherStatus {
            machine_sense: false,
            ..status("alice")
        };
        assert!(MachinePicture::of(std::slice::from_ref(&alone)).is_none());
        let (before, after) = OwnerLines::of(&alone).without_common(None);
        assert!(before.contains("absent") && after.contains("source    logins"));
    }
}

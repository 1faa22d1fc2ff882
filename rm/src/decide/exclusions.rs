//! Hosts that a decision does not use, each with its reason.
//!
//! A decision without a placement examines all hosts, possibly ten thousand. The list of excluded
//! hosts therefore contains a limited number of hosts, and the decision only counts the further
//! ones.

use super::{Attribute, ExclusionReason, Metric};
use sempa_proto::HostId;
use std::fmt;
use std::ops::Index;
use std::sync::Arc;

/// Maximum number of listed hosts in each of two groups: hosts that the request does not ask for,
/// and all other excluded hosts.
pub const EXCLUDED_HOSTS_MAX: usize = 256;

/// Excluded hosts with their reasons. Cloning is cheap, because clones share the list.
#[derive(Clone, Default)]
pub struct Exclusions {
    entries: Arc<Vec<(HostId, ExclusionReason)>>,
    /// Host that is omitted from the result although `entries` may contain it. The exclusions of
    /// several tasks share `entries`.
    omitted_host: Option<HostId>,
    /// Number of excluded hosts with a reportable reason that `entries` does not contain.
    unlisted_count: usize,
}

impl Exclusions {
    /// Returns the listed hosts with reasons, in the order of examination.
    pub fn iter(&self) -> impl Iterator<Item = &(HostId, ExclusionReason)> {
        self.entries
            .iter()
            .filter(|(id, _)| Some(*id) != self.omitted_host)
    }

    pub fn len(&self) -> usize {
        self.iter().count()
    }

    pub fn is_empty(&self) -> bool {
        self.iter().next().is_none()
    }

    /// True if this host is listed with this reason.
    pub fn contains(&self, exclusion: &(HostId, ExclusionReason)) -> bool {
        self.iter().any(|entry| entry == exclusion)
    }

    /// Returns the listed hosts that have a reportable reason, and the number of such hosts that
    /// the list does not contain.
    pub(super) fn reportable_entries(&self) -> (Vec<&(HostId, ExclusionReason)>, usize) {
        (
            self.iter().filter(|(_, why)| !is_unreported(why)).collect(),
            self.unlisted_count,
        )
    }

    /// Returns the same exclusions without this host. The host must have been added with a
    /// reportable reason, and all hosts must have been added by ascending id.
    pub(super) fn without_host(&self, host: HostId) -> Self {
        let in_listed_range = self
            .entries
            .last()
            .is_some_and(|(last_listed_host, _)| host <= *last_listed_host);
        let is_listed = in_listed_range
            && self
                .entries
                .binary_search_by_key(&host, |(id, _)| *id)
                .is_ok();
        let remaining_unlisted_count = if is_listed {
            self.unlisted_count
        } else {
            self.unlisted_count.saturating_sub(1)
        };
        Self {
            entries: self.entries.clone(),
            omitted_host: Some(host),
            unlisted_count: remaining_unlisted_count,
        }
    }
}

impl PartialEq for Exclusions {
    fn eq(&self, other: &Self) -> bool {
        self.unlisted_count == other.unlisted_count && self.iter().eq(other.iter())
    }
}

impl Eq for Exclusions {}

impl fmt::Debug for Exclusions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()?;
        if self.unlisted_count > 0 {
            write!(f, " and {} more", self.unlisted_count)
        } else {
            Ok(())
        }
    }
}

impl Index<usize> for Exclusions {
    type Output = (HostId, ExclusionReason);

    fn index(&self, position: usize) -> &(HostId, ExclusionReason) {
        self.iter()
            .nth(position)
            .expect("the index is less than the length")
    }
}

/// True if a host with this reason is not reported, because the request did not ask for the host.
fn is_unreported<S>(why: &ExclusionReason<S>) -> bool {
    matches!(
        why,
        ExclusionReason::OtherHost | ExclusionReason::Complement
    )
}

/// True for temporary reasons: the host may become usable later.
fn is_temporary(why: &ExclusionReason<&str>) -> bool {
    match why {
        ExclusionReason::OwnerPresent { .. }
        | ExclusionReason::Closed { .. }
        | ExclusionReason::Drained { .. }
        | ExclusionReason::TaskLimit { .. }
        | ExclusionReason::Declined
        | ExclusionReason::Reserved
        | ExclusionReason::MemoryReserved { .. } => true,
        ExclusionReason::UnmetCondition { condition, .. } => {
            matches!(
                condition.attribute,
                Attribute::Metric(Metric::Memory | Metric::IdleProcessors)
            )
        }
        _ => false,
    }
}

/// Collects the excluded hosts of a decision.
#[derive(Debug, Default)]
pub(super) struct ExclusionsBuilder {
    entries: Vec<(HostId, ExclusionReason)>,
    reportable_count: usize,
    unreported_count: usize,
    /// True if at least one reason is temporary.
    pub(super) any_temporary: bool,
    /// True if at least one host was lost or did not answer.
    pub(super) any_unanswered: bool,
    /// True if at least one excluded host is among the hosts and architectures that the request
    /// asks for.
    pub(super) any_requested: bool,
}

impl ExclusionsBuilder {
    pub(super) fn add(&mut self, host: HostId, why: ExclusionReason<&str>) {
        self.any_temporary |= is_temporary(&why);
        self.any_unanswered |= why == ExclusionReason::NoAnswer;
        let is_unreported_reason = is_unreported(&why);
        self.any_requested |=
            !is_unreported_reason && !matches!(why, ExclusionReason::OtherArch { .. });
        let group_count = if is_unreported_reason {
            &mut self.unreported_count
        } else {
            &mut self.reportable_count
        };
        *group_count += 1;
        if *group_count <= EXCLUDED_HOSTS_MAX {
            self.entries.push((host, why.into_owned()));
        }
    }

    /// Returns the number of excluded hosts, including those that the list does not contain.
    pub(super) fn excluded_count(&self) -> usize {
        self.reportable_count + self.unreported_count
    }

    pub(super) fn build(self) -> Exclusions {
        let excess = self.reportable_count.saturating_sub(EXCLUDED_HOSTS_MAX);
        Exclusions {
            entries: Arc::new(self.entries),
            omitted_host: None,
            unlisted_count: excess,
        }
    }
}

//! Hosts that a decision does not use, each with its reason.
//!
//! A decision without a placement examines all hosts, possibly ten thousand. The list therefore
//! contains a limited number of hosts, and the further ones are only counted.

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
    listed: Arc<Vec<(HostId, ExclusionReason)>>,
    /// Host that is left out of the result although `listed` may contain it. `listed` is shared
    /// with the results for other tasks.
    omitted: Option<HostId>,
    /// Number of hosts that are not listed in `listed` but have a reportable reason.
    unlisted: usize,
}

impl Exclusions {
    /// Returns the listed hosts with reasons, in the order of examination.
    pub fn iter(&self) -> impl Iterator<Item = &(HostId, ExclusionReason)> {
        self.listed
            .iter()
            .filter(|(id, _)| Some(*id) != self.omitted)
    }

    pub fn len(&self) -> usize {
        self.iter().count()
    }

    pub fn is_empty(&self) -> bool {
        self.iter().next().is_none()
    }

    /// True if this host is listed with this reason.
    pub fn contains(&self, host: &(HostId, ExclusionReason)) -> bool {
        self.iter().any(|listed| listed == host)
    }

    /// Returns the listed hosts that have a reportable reason, and the number of such hosts that
    /// are not listed.
    pub(super) fn reportable(&self) -> (Vec<&(HostId, ExclusionReason)>, usize) {
        (
            self.iter().filter(|(_, why)| !is_unreported(why)).collect(),
            self.unlisted,
        )
    }

    /// Returns the same exclusions without this host. Requires that the host was added with a
    /// reportable reason, and that hosts were added by ascending id.
    pub(super) fn without_host(&self, host: HostId) -> Exclusions {
        let may_be = self.listed.last().is_some_and(|(last, _)| host <= *last);
        let listed = may_be
            && self
                .listed
                .binary_search_by_key(&host, |(id, _)| *id)
                .is_ok();
        let more = if listed {
            self.unlisted
        } else {
            self.unlisted.saturating_sub(1)
        };
        Exclusions {
            listed: self.listed.clone(),
            omitted: Some(host),
            unlisted: more,
        }
    }
}

impl PartialEq for Exclusions {
    fn eq(&self, other: &Exclusions) -> bool {
        self.unlisted == other.unlisted && self.iter().eq(other.iter())
    }
}

impl Eq for Exclusions {}

impl fmt::Debug for Exclusions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()?;
        if self.unlisted > 0 {
            write!(f, " and {} more", self.unlisted)
        } else {
            Ok(())
        }
    }
}

impl Index<usize> for Exclusions {
    type Output = (HostId, ExclusionReason);

    fn index(&self, at: usize) -> &(HostId, ExclusionReason) {
        self.iter()
            .nth(at)
            .expect("the index is less than the length")
    }
}

/// True for reasons that are not reported, because the request did not ask for the host.
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
        | ExclusionReason::MemoryKept { .. } => true,
        ExclusionReason::Unmet { condition, .. } => {
            matches!(
                condition.attribute,
                Attribute::Metric(Metric::Memory | Metric::Free)
            )
        }
        _ => false,
    }
}

/// Collects the excluded hosts of a decision.
#[derive(Debug, Default)]
pub(super) struct ExclusionsBuilder {
    listed: Vec<(HostId, ExclusionReason)>,
    reportable: usize,
    unreported: usize,
    /// True if at least one reason is temporary.
    pub(super) any_temporary: bool,
    /// True if at least one host was lost or did not answer.
    pub(super) any_unanswered: bool,
    /// True if the request asks for at least one of the excluded hosts.
    pub(super) any_requested: bool,
}

impl ExclusionsBuilder {
    pub(super) fn add(&mut self, host: HostId, why: ExclusionReason<&str>) {
        self.any_temporary |= is_temporary(&why);
        self.any_unanswered |= why == ExclusionReason::NoAnswer;
        let untold = is_unreported(&why);
        self.any_requested |= !untold && !matches!(why, ExclusionReason::OtherArch { .. });
        let count = if untold {
            &mut self.unreported
        } else {
            &mut self.reportable
        };
        *count += 1;
        if *count <= EXCLUDED_HOSTS_MAX {
            self.listed.push((host, why.into_owned()));
        }
    }

    /// Returns the number of excluded hosts, listed or not.
    pub(super) fn count(&self) -> usize {
        self.reportable + self.unreported
    }

    pub(super) fn build(self) -> Exclusions {
        let more = self.reportable.saturating_sub(EXCLUDED_HOSTS_MAX);
        Exclusions {
            listed: Arc::new(self.listed),
            omitted: None,
            unlisted: more,
        }
    }
}

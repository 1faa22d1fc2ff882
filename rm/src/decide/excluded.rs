//! Hosts that a decision does not use, each with its reason.
//!
//! A decision without a placement examines all hosts, possibly ten thousand. The list keeps only
//! the reasons that may be reported, and counts or summarizes the rest.

use super::{Figure, Name, Reason};
use sempa_proto::HostId;
use std::fmt;
use std::ops::Index;
use std::sync::Arc;

/// Maximum number of listed hosts for each of two groups: hosts with a reason of their own, and
/// hosts that the request does not ask for. Further hosts are counted.
pub const EXCLUDED_HOSTS_MAX: usize = 256;

/// Excluded hosts with their reasons. Clones share the list.
#[derive(Clone, Default)]
pub struct Excluded {
    first: Arc<Vec<(HostId, Reason)>>,
    /// Host that is omitted although it is in `first`, because `first` is shared with other
    /// decisions.
    except: Option<HostId>,
    /// Number of reportable hosts that are not listed.
    more: usize,
}

impl Excluded {
    /// Returns the listed hosts with reasons, in the order of examination.
    pub fn iter(&self) -> impl Iterator<Item = &(HostId, Reason)> {
        self.first.iter().filter(|(id, _)| Some(*id) != self.except)
    }

    pub fn len(&self) -> usize {
        self.iter().count()
    }

    pub fn is_empty(&self) -> bool {
        self.iter().next().is_none()
    }

    /// True if this host is listed with this reason.
    pub fn contains(&self, host: &(HostId, Reason)) -> bool {
        self.iter().any(|listed| listed == host)
    }

    /// Returns the reportable hosts in the list, and the number of those that are not listed.
    pub(super) fn told(&self) -> (Vec<&(HostId, Reason)>, usize) {
        (
            self.iter().filter(|(_, why)| !is_untold(why)).collect(),
            self.more,
        )
    }

    /// Returns the same exclusions without this host. The host must have been added with a
    /// reportable reason, and hosts must have been added by ascending id.
    pub(super) fn without(&self, host: HostId) -> Excluded {
        let may_be = self.first.last().is_some_and(|(last, _)| host <= *last);
        let listed = may_be
            && self
                .first
                .binary_search_by_key(&host, |(id, _)| *id)
                .is_ok();
        let more = if listed {
            self.more
        } else {
            self.more.saturating_sub(1)
        };
        Excluded {
            first: self.first.clone(),
            except: Some(host),
            more,
        }
    }
}

impl PartialEq for Excluded {
    fn eq(&self, other: &Excluded) -> bool {
        self.more == other.more && self.iter().eq(other.iter())
    }
}

impl Eq for Excluded {}

impl fmt::Debug for Excluded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()?;
        if self.more > 0 {
            write!(f, " and {} more", self.more)
        } else {
            Ok(())
        }
    }
}

impl Index<usize> for Excluded {
    type Output = (HostId, Reason);

    fn index(&self, at: usize) -> &(HostId, Reason) {
        self.iter()
            .nth(at)
            .expect("the index is less than the length")
    }
}

/// True for reasons that are not reported: the request did not ask for the host.
fn is_untold<S>(why: &Reason<S>) -> bool {
    matches!(why, Reason::OtherHost | Reason::Complement)
}

/// True for reasons that may end while the set of hosts stays the same.
fn may_pass(why: &Reason<&str>) -> bool {
    match why {
        Reason::Owner { .. }
        | Reason::Closed { .. }
        | Reason::Drained { .. }
        | Reason::Cores { .. }
        | Reason::Declined
        | Reason::Kept
        | Reason::Memory { .. } => true,
        Reason::Unmet { condition, .. } => {
            matches!(condition.name, Name::Figure(Figure::Memory | Figure::Free))
        }
        _ => false,
    }
}

/// Collects the excluded hosts of a decision.
#[derive(Debug, Default)]
pub(super) struct Excluding {
    first: Vec<(HostId, Reason)>,
    told: usize,
    untold: usize,
    /// At least one reason is temporary.
    pub(super) may_pass: bool,
    /// At least one host did not answer.
    pub(super) no_answer: bool,
    /// At least one host matches the request.
    pub(super) asked_for: bool,
}

impl Excluding {
    pub(super) fn add(&mut self, host: HostId, why: Reason<&str>) {
        self.may_pass |= may_pass(&why);
        self.no_answer |= why == Reason::NoAnswer;
        let untold = is_untold(&why);
        self.asked_for |= !untold && !matches!(why, Reason::OtherArch { .. });
        let count = if untold {
            &mut self.untold
        } else {
            &mut self.told
        };
        *count += 1;
        if *count <= EXCLUDED_HOSTS_MAX {
            self.first.push((host, why.own()));
        }
    }

    /// Returns the number of excluded hosts, listed or not.
    pub(super) fn count(&self) -> usize {
        self.told + self.untold
    }

    pub(super) fn done(self) -> Excluded {
        let more = self.told.saturating_sub(EXCLUDED_HOSTS_MAX);
        Excluded {
            first: Arc::new(self.first),
            except: None,
            more,
        }
    }
}

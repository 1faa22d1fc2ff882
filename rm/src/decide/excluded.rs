//! Hosts that a decision does not use, each with its reason. A decision over ten thousand hosts looks at all of them when it
//! finds no place; it keeps the reasons that anybody will read, and of the others what it needs itself.

use super::{Figure, Name, Reason};
use sempa_proto::HostId;
use std::fmt;
use std::ops::Index;
use std::sync::Arc;

/// Hosts that are listed at most for each of two kinds of reasons: those of the hosts, and that the request does not speak of
/// them. The others are counted.
pub const EXCLUDED_HOSTS_MAX: usize = 256;

/// Hosts that were not used, and why not; clones share their list.
#[derive(Clone, Default)]
pub struct Excluded {
    first: Arc<Vec<(HostId, Reason)>>,
    /// Not listed although it is in `first`, which is shared with decisions that another host is not part of.
    except: Option<HostId>,
    /// Of those that are worth a word, how many are not listed.
    more: usize,
}

impl Excluded {
    /// The first that were looked at, with why not.
    pub fn iter(&self) -> impl Iterator<Item = &(HostId, Reason)> {
        self.first.iter().filter(|(id, _)| Some(*id) != self.except)
    }

    /// How many are listed.
    pub fn len(&self) -> usize {
        self.iter().count()
    }

    /// True when none is listed.
    pub fn is_empty(&self) -> bool {
        self.iter().next().is_none()
    }

    /// True when this host is listed with this reason.
    pub fn contains(&self, host: &(HostId, Reason)) -> bool {
        self.iter().any(|listed| listed == host)
    }

    /// Those that are worth a word, and how many more of them are not listed.
    pub(super) fn told(&self) -> (Vec<&(HostId, Reason)>, usize) {
        (
            self.iter().filter(|(_, why)| !is_untold(why)).collect(),
            self.more,
        )
    }

    /// The same for a decision in which this host has no part. It is in here with a reason that is worth a word, and the
    /// hosts were looked at by rising id.
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
        self.iter().nth(at).expect("there are so many")
    }
}

/// Nobody wants to hear of each host that he did not ask for.
fn is_untold<S>(why: &Reason<S>) -> bool {
    matches!(why, Reason::OtherHost | Reason::Complement)
}

/// True for reasons that may pass while the virtual machine stays as it is.
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

/// Hosts that are not used while a decision is made.
#[derive(Debug, Default)]
pub(super) struct Excluding {
    first: Vec<(HostId, Reason)>,
    told: usize,
    untold: usize,
    /// One of the reasons may pass.
    pub(super) may_pass: bool,
    /// One of the hosts did not answer.
    pub(super) no_answer: bool,
    /// One of the hosts is what the request speaks of.
    pub(super) asked_for: bool,
}

impl Excluding {
    /// One host more.
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

    /// How many there are.
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

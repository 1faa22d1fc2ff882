//! Typed identifiers. The compiler refuses a task id where a host id is expected.

use serde::{Deserialize, Serialize};
use std::fmt;
use thiserror::Error;

/// Bit 31 of a tid marks the address of a daemon (pvm_intro, "task identifiers").
const DAEMON_BIT: u32 = 0x8000_0000;
/// Bit 30 of a tid marks a multicast address.
const MULTICAST_BIT: u32 = 0x4000_0000;
/// Bits 18 to 29 of a tid contain the host index.
const HOST_MASK: u32 = 0x3ffc_0000;
/// Bits 0 to 17 of a tid contain the number of the task on its birth host.
const LOCAL_MASK: u32 = 0x0003_ffff;
/// Number of the lowest bit of the host index in a tid.
const HOST_SHIFT: u32 = 18;

/// Index of a host in the virtual machine, 1..=4095; the master is 1. Deserialization refuses any
/// other number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "u16")]
pub struct HostId(u16);

impl HostId {
    /// The host whose daemon started the virtual machine.
    pub const MASTER: Self = Self(1);
    /// Largest index that fits the 12 bits of a tid.
    pub const INDEX_MAX: u16 = 4095;

    /// Creates a host id; `None` if `index` is outside 1..=4095.
    pub fn new(index: u16) -> Option<Self> {
        (1..=Self::INDEX_MAX)
            .contains(&index)
            .then_some(Self(index))
    }

    /// Creates the id of a simulated host, 1..=65535; `None` for 0.
    ///
    /// Placement decisions use only host numbers, so placement can be simulated with more hosts
    /// than a tid can express. Outside simulations these numbers do not occur: a host above
    /// [`HostId::INDEX_MAX`] has no tid ([`Tid::NONE`]) and cannot start tasks, and deserialization
    /// refuses its id.
    pub fn new_simulated(index: u16) -> Option<Self> {
        (index > 0).then_some(Self(index))
    }

    /// Returns the index, 1..=4095; up to 65535 in simulations.
    pub fn index(self) -> u16 {
        self.0
    }

    /// Returns the host's tid as applications see it (`hi_tid`): only the host part is set.
    /// [`Tid::NONE`] for a simulated host above [`HostId::INDEX_MAX`].
    pub fn tid(self) -> Tid {
        if self.0 <= Self::INDEX_MAX {
            Tid(u32::from(self.0) << HOST_SHIFT)
        } else {
            Tid::NONE
        }
    }

    /// Returns the address of the host's daemon: host part with bit 31 set.
    pub fn daemon_tid(self) -> Tid {
        Tid(DAEMON_BIT | self.tid().0)
    }
}

impl TryFrom<u16> for HostId {
    type Error = InvalidHostIndex;

    fn try_from(index: u16) -> Result<Self, InvalidHostIndex> {
        Self::new(index).ok_or(InvalidHostIndex(index))
    }
}

/// A number outside the range of host indices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("{0} is not a host index; valid are 1 to {max}", max = HostId::INDEX_MAX)]
pub struct InvalidHostIndex(pub u16);

impl fmt::Display for HostId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "host {}", self.0)
    }
}

/// A task identifier in PVM's layout. Bit 31: daemon address; bit 30: multicast address; bits
/// 18-29: birth host; bits 0-17: local number.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
pub struct Tid(u32);

impl Tid {
    /// No task. Also the parent of a task that was not spawned.
    pub const NONE: Self = Self(0);
    /// Address by which a task reaches its own daemon. Also the source of messages that this daemon
    /// creates.
    pub const MY_DAEMON: Self = Self(DAEMON_BIT);
    pub const LOCAL_PART_MAX: u32 = LOCAL_MASK;

    /// Builds a task's tid from its birth host and its local number (1..=262143). Returns `None` if
    /// the local number is outside this range or the host is above [`HostId::INDEX_MAX`].
    pub fn for_task(host: HostId, local: u32) -> Option<Self> {
        let host_tid = Some(host.tid()).filter(|host_tid| *host_tid != Self::NONE)?;
        (1..=LOCAL_MASK)
            .contains(&local)
            .then_some(Self(host_tid.0 | local))
    }

    /// Converts the 32 bits that a program passes, without any check.
    pub const fn from_raw(raw: i32) -> Self {
        Self(raw as u32)
    }

    /// Returns the 32 bits that C programs see.
    pub const fn raw(self) -> i32 {
        self.0 as i32
    }

    /// True for the tid of a task: neither a daemon nor a multicast address, with a host part and a
    /// local part other than 0.
    pub fn is_task(self) -> bool {
        self.0 & (DAEMON_BIT | MULTICAST_BIT) == 0
            && self.0 & HOST_MASK != 0
            && self.0 & LOCAL_MASK != 0
    }

    /// True for the address of a daemon, including [`Tid::MY_DAEMON`].
    pub fn is_daemon(self) -> bool {
        self.0 & DAEMON_BIT != 0 && self.0 & (MULTICAST_BIT | LOCAL_MASK) == 0
    }

    /// Returns the host on which the task was created; `None` if the host part is empty. A task
    /// that has migrated keeps its tid, so its birth host is not necessarily the host on which it
    /// runs.
    pub fn birth_host(self) -> Option<HostId> {
        HostId::new(((self.0 & HOST_MASK) >> HOST_SHIFT) as u16)
    }

    /// Returns the number of the task on its birth host; 0 for the tids of hosts and daemons.
    pub fn local_part(self) -> u32 {
        self.0 & LOCAL_MASK
    }

    /// Returns the tid of the birth host: the host bits of this tid, without any check
    /// (`pvm_tidtohost`).
    pub fn host_part(self) -> Self {
        Self(self.0 & HOST_MASK)
    }
}

impl fmt::Display for Tid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "t{:x}", self.0)
    }
}

impl fmt::LowerHex for Tid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::LowerHex::fmt(&self.0, f)
    }
}

macro_rules! counter {
    ($(#[$doc:meta])* $name:ident, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        pub struct $name(pub u64);

        impl $name {
            #[must_use]
            pub fn next(self) -> $name {
                $name(self.0 + 1)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }
    };
}

counter! {
    /// Number of a change of the host table or of a task's location, ascending. Orders of an older
    /// epoch are refused.
    Epoch, "e"
}
counter! {
    /// Number of one attempt to migrate one task, unique in the virtual machine.
    MigrationId, "m"
}
counter! {
    /// Number of a job: a task without a parent, with all its descendants.
    JobId, "j"
}
counter! {
    /// Number of a period in which a link uses a route. A later use of the same route has another
    /// number.
    RouteId, "r"
}
counter! {
    /// Number that pairs a request with its reply; unique per requester.
    RequestId, "q"
}

/// A point in time or a duration in microseconds of the caller's clock. This crate only compares
/// and adds such values.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
pub struct Micros(pub u64);

impl Micros {
    pub const fn from_millis(ms: u64) -> Self {
        Self(ms * 1000)
    }

    pub const fn from_secs(s: u64) -> Self {
        Self(s * 1_000_000)
    }

    /// Returns `self - earlier`, or zero if `earlier` is later.
    #[must_use]
    pub fn since(self, earlier: Self) -> Self {
        Self(self.0.saturating_sub(earlier.0))
    }
}

impl std::ops::Add for Micros {
    type Output = Self;
    fn add(self, duration: Self) -> Self {
        Self(self.0.saturating_add(duration.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tid_layout_matches_pvm() {
        let host = HostId::new(2).expect("2 is an index");
        let tid = Tid::for_task(host, 1).expect("1 is a local part");
        assert_eq!(tid.raw(), 0x80001);
        assert_eq!(tid.to_string(), "t80001");
        assert_eq!(host.tid().raw(), 0x80000);
        assert_eq!(host.daemon_tid().raw() as u32, 0x8008_0000);
        assert!(tid.is_task() && !tid.is_daemon());
        assert!(host.daemon_tid().is_daemon() && Tid::MY_DAEMON.is_daemon());
        assert_eq!(tid.birth_host(), Some(host));
        assert_eq!(tid.host_part(), host.tid());
    }

    #[test]
    fn out_of_range_ids_are_refused() {
        assert_eq!(HostId::new(0), None);
        assert_eq!(HostId::new(4096), None);
        assert_eq!(Tid::for_task(HostId::MASTER, 0), None);
        assert_eq!(Tid::for_task(HostId::MASTER, 0x40000), None);
        assert!(!Tid::from_raw(-1).is_task());
        assert!(!Tid::from_raw(-1).is_daemon());
        assert!(!Tid::NONE.is_task());
    }

    /// A host id is serialized as its index. Deserialization fails outside 1..=4095, with an error
    /// that names the range.
    #[test]
    fn host_id_deserialization_checks_range() {
        for index in [1, 2, HostId::INDEX_MAX] {
            let host = HostId::new(index).expect("an index");
            let bytes = postcard::to_allocvec(&host).expect("a host is written");
            assert_eq!(
                bytes,
                postcard::to_allocvec(&index).expect("a number is written")
            );
            assert_eq!(postcard::from_bytes::<HostId>(&bytes), Ok(host));
        }
        for index in [0, HostId::INDEX_MAX + 1, 10_000, u16::MAX] {
            let bytes = postcard::to_allocvec(&index).expect("a number is written");
            assert!(postcard::from_bytes::<HostId>(&bytes).is_err(), "{index}");
            let list_bytes = postcard::to_allocvec(&[1, index]).expect("numbers are written");
            assert!(
                postcard::from_bytes::<[HostId; 2]>(&list_bytes).is_err(),
                "{index}"
            );
            let message = HostId::try_from(index).expect_err("no host").to_string();
            assert_eq!(
                message,
                format!("{index} is not a host index; valid are 1 to 4095")
            );
        }
    }

    /// A simulated host above the tid range has no tid, no tasks and no birth host.
    #[test]
    fn simulated_host_has_no_tid() {
        assert_eq!(HostId::new_simulated(0), None);
        assert_eq!(HostId::new_simulated(7), HostId::new(7));
        let simulated_host = HostId::new_simulated(10_000).expect("a number");
        assert_eq!(
            (
                simulated_host.index(),
                simulated_host.tid(),
                Tid::for_task(simulated_host, 1)
            ),
            (10_000, Tid::NONE, None)
        );
        assert!(simulated_host.daemon_tid().birth_host().is_none());
        let bytes = postcard::to_allocvec(&simulated_host).expect("it is written");
        assert!(postcard::from_bytes::<HostId>(&bytes).is_err());
    }
}

//! The tables of the history, and the encoding of their entries.

use super::History;
use sempa_proto::event::Event;
use sempa_proto::{HostId, Micros, Tid, frame};
use serde::{Deserialize, Serialize};

/// A table of the history. The keys are consecutive numbers for jobs, tasks, decisions and vacated
/// jobs. For the other tables they are ids of users, hosts or tasks, unless noted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Table {
    /// The position in the event log. The only key is 0.
    LogPosition,
    Users,
    Jobs,
    Tasks,
    Decisions,
    /// Learned values, each in an encoding of its own. The key identifies the kind of value.
    Learned,
    Hosts,
    /// Tasks from a command line without children: start time and user, by tid.
    Childless,
    /// Hosts that are being drained.
    Drains,
    /// Vacated jobs: checkpointed and ended, to be restarted when there is room.
    Vacated,
}

impl Table {
    pub const ALL: [Table; 10] = [
        Table::LogPosition,
        Table::Users,
        Table::Jobs,
        Table::Tasks,
        Table::Decisions,
        Table::Learned,
        Table::Hosts,
        Table::Childless,
        Table::Drains,
        Table::Vacated,
    ];
}

/// One change that must be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    pub table: Table,
    pub key: u64,
    /// The new value. `None` deletes the entry.
    pub value: Option<Vec<u8>>,
}

/// Changes that are written together.
pub type Batch = Vec<Change>;

/// Position up to which the event log was applied: number, time and host of the last entry. Time
/// and host show whether an event log belongs to the same virtual machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogPosition {
    /// Number of the last entry; 0 if no entry was applied.
    pub number: u64,
    pub at: Micros,
    pub host: u16,
}

impl LogPosition {
    /// Returns the position after `event`.
    pub fn after(event: &Event) -> LogPosition {
        LogPosition {
            number: event.number,
            at: event.at,
            host: event.host.index(),
        }
    }
}

impl History {
    pub(super) fn read_one(&mut self, table: Table, key: u64, value: &[u8]) -> Option<()> {
        match table {
            Table::LogPosition => self.log_position = frame::from_bytes(value).ok()?,
            Table::Users => drop(
                self.users
                    .insert(u32::try_from(key).ok()?, frame::from_bytes(value).ok()?),
            ),
            Table::Jobs => drop(self.jobs.insert(key, frame::from_bytes(value).ok()?)),
            Table::Tasks => drop(self.tasks.insert(key, frame::from_bytes(value).ok()?)),
            Table::Decisions => {
                self.decisions.insert(key, frame::from_bytes(value).ok()?);
                self.decision_bytes.set(key, Some(value.len()));
            }
            Table::Learned => drop(self.learned.insert(key, value.to_vec())),
            Table::Hosts => {
                self.hosts
                    .insert(host_of(key)?, String::from_utf8(value.to_vec()).ok()?);
            }
            Table::Childless => drop(
                self.childless
                    .insert(tid_of_key(key)?, frame::from_bytes(value).ok()?),
            ),
            Table::Drains => drop(
                self.drains
                    .insert(host_of(key)?, frame::from_bytes(value).ok()?),
            ),
            Table::Vacated => drop(self.vacated.insert(key, frame::from_bytes(value).ok()?)),
        }
        Some(())
    }

    pub(super) fn encode_entry(&self, table: Table, key: u64) -> Option<Vec<u8>> {
        let bytes = match table {
            Table::LogPosition => frame::to_bytes(&self.log_position),
            Table::Users => frame::to_bytes(self.users.get(&u32::try_from(key).ok()?)?),
            Table::Jobs => frame::to_bytes(self.jobs.get(&key)?),
            Table::Tasks => frame::to_bytes(self.tasks.get(&key)?),
            Table::Decisions => frame::to_bytes(self.decisions.get(&key)?),
            Table::Learned => return self.learned.get(&key).cloned(),
            Table::Hosts => {
                return self
                    .hosts
                    .get(&host_of(key)?)
                    .map(|name| name.clone().into_bytes());
            }
            Table::Childless => frame::to_bytes(self.childless.get(&tid_of_key(key)?)?),
            Table::Drains => frame::to_bytes(self.drains.get(&host_of(key)?)?),
            Table::Vacated => frame::to_bytes(self.vacated.get(&key)?),
        };
        // Encoding cannot fail: these are plain records of numbers and short texts.
        bytes.ok()
    }
}

pub(super) fn key_of_tid(tid: Tid) -> u64 {
    u64::from(tid.raw().cast_unsigned())
}

fn host_of(key: u64) -> Option<HostId> {
    HostId::new(u16::try_from(key).ok()?)
}

fn tid_of_key(key: u64) -> Option<Tid> {
    u32::try_from(key)
        .ok()
        .map(|raw| Tid::from_raw(raw.cast_signed()))
}

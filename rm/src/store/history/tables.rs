//! The tables of the history, and the encoding of their entries.

use super::History;
use sempa_proto::event::Event;
use sempa_proto::{HostId, Micros, Tid, frame};
use serde::{Deserialize, Serialize};

/// A table of the history. The keys of jobs, tasks, decisions and vacated jobs are consecutive
/// numbers. The keys of the other tables are ids of users, hosts or tasks, unless noted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Table {
    /// The position in the event log. The only key is 0.
    LogPosition,
    Users,
    Jobs,
    Tasks,
    Decisions,
    /// Learned values, each in an encoding of its own. The key identifies the kind of value.
    LearnedValues,
    Hosts,
    /// Tasks that were started from a command line and have no children: start time and user, by
    /// tid.
    ChildlessTasks,
    /// Hosts that are being drained.
    Drains,
    /// Vacated jobs: checkpointed and ended jobs that are restarted when hosts have room for them.
    VacatedJobs,
}

impl Table {
    pub const ALL: [Self; 10] = [
        Self::LogPosition,
        Self::Users,
        Self::Jobs,
        Self::Tasks,
        Self::Decisions,
        Self::LearnedValues,
        Self::Hosts,
        Self::ChildlessTasks,
        Self::Drains,
        Self::VacatedJobs,
    ];
}

/// One change of the database that must be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    pub table: Table,
    pub key: u64,
    /// The new value. `None` deletes the entry.
    pub value: Option<Vec<u8>>,
}

/// Changes that are written together in one transaction.
pub type Batch = Vec<Change>;

/// Position up to which the event log was applied: number, time and host of the last entry. The
/// time and the host show whether an event log belongs to the same virtual machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogPosition {
    /// Number of the last entry; 0 if no entry was applied.
    pub event_number: u64,
    pub event_time: Micros,
    pub host_index: u16,
}

impl LogPosition {
    /// Returns the position that is reached by applying `event`.
    pub fn after_event(event: &Event) -> Self {
        Self {
            event_number: event.number,
            event_time: event.at,
            host_index: event.host.index(),
        }
    }
}

impl History {
    pub(super) fn read_entry(&mut self, table: Table, key: u64, value: &[u8]) -> Option<()> {
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
                self.decision_sizes.set_bytes(key, Some(value.len()));
            }
            Table::LearnedValues => drop(self.learned_values.insert(key, value.to_vec())),
            Table::Hosts => {
                self.host_names
                    .insert(key_to_host(key)?, String::from_utf8(value.to_vec()).ok()?);
            }
            Table::ChildlessTasks => drop(
                self.childless_tasks
                    .insert(key_to_tid(key)?, frame::from_bytes(value).ok()?),
            ),
            Table::Drains => drop(
                self.drains
                    .insert(key_to_host(key)?, frame::from_bytes(value).ok()?),
            ),
            Table::VacatedJobs => drop(
                self.vacated_jobs
                    .insert(key, frame::from_bytes(value).ok()?),
            ),
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
            Table::LearnedValues => return self.learned_values.get(&key).cloned(),
            Table::Hosts => {
                return self
                    .host_names
                    .get(&key_to_host(key)?)
                    .map(|name| name.clone().into_bytes());
            }
            Table::ChildlessTasks => frame::to_bytes(self.childless_tasks.get(&key_to_tid(key)?)?),
            Table::Drains => frame::to_bytes(self.drains.get(&key_to_host(key)?)?),
            Table::VacatedJobs => frame::to_bytes(self.vacated_jobs.get(&key)?),
        };
        // Encoding cannot fail, because the values are plain records of numbers and short texts.
        bytes.ok()
    }
}

pub(super) fn tid_to_key(tid: Tid) -> u64 {
    u64::from(tid.raw().cast_unsigned())
}

fn key_to_host(key: u64) -> Option<HostId> {
    HostId::new(u16::try_from(key).ok()?)
}

fn key_to_tid(key: u64) -> Option<Tid> {
    u32::try_from(key)
        .ok()
        .map(|raw| Tid::from_raw(raw.cast_signed()))
}

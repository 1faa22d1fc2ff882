//! The record of one tasker.

use std::fmt;
use std::str::FromStr;
use thiserror::Error;

/// The use of a host by one tasker or by several together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostUse {
    /// Tasks that run or arrive, and ended tasks that have left processes; without
    /// [`HostUse::services`].
    pub guests: u64,
    /// Tasks that are services of the virtual machine, such as its load watcher.
    pub services: u64,
    pub control_groups: u64,
    /// Images that the tasker keeps, in bytes.
    pub image_bytes: u64,
    /// Memory of the tasks, in bytes; 0 for users without a limit of memory, except for tasks that
    /// arrive.
    pub memory_bytes: u64,
    /// Memory of the task that uses most and that may be killed for it, in bytes. The greatest of
    /// several taskers.
    pub largest_task_bytes: u64,
}

/// Returns one of the numbers.
type Field = fn(&mut HostUse) -> &mut u64;

impl HostUse {
    /// Each number with its name in records.
    const FIELDS: [(&'static str, Field); 6] = [
        ("guests", |usage| &mut usage.guests),
        ("services", |usage| &mut usage.services),
        ("control_groups", |usage| &mut usage.control_groups),
        ("image_bytes", |usage| &mut usage.image_bytes),
        ("memory_bytes", |usage| &mut usage.memory_bytes),
        ("largest_task_bytes", |usage| &mut usage.largest_task_bytes),
    ];

    /// Returns the use of this tasker and another one together.
    #[must_use]
    pub fn plus(&self, other: &Self) -> Self {
        Self {
            guests: self.guests.saturating_add(other.guests),
            services: self.services.saturating_add(other.services),
            control_groups: self.control_groups.saturating_add(other.control_groups),
            image_bytes: self.image_bytes.saturating_add(other.image_bytes),
            memory_bytes: self.memory_bytes.saturating_add(other.memory_bytes),
            largest_task_bytes: self.largest_task_bytes.max(other.largest_task_bytes),
        }
    }
}

/// The content of a tasker's record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AccountRecord {
    /// User whose tasks the tasker runs.
    pub uid: u32,
    /// Start time of the tasker's process, in clock ticks since boot. Distinguishes the tasker from
    /// a later process with the same PID.
    pub start_ticks: u64,
    pub usage: HostUse,
}

impl fmt::Display for AccountRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "uid {}\nstart_ticks {}", self.uid, self.start_ticks)?;
        let mut usage = self.usage;
        for (name, field) in HostUse::FIELDS {
            writeln!(f, "{name} {}", field(&mut usage))?;
        }
        Ok(())
    }
}

/// A text that is not the record of a tasker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("it is no record of a tasker's use")]
pub struct InvalidRecord;

impl FromStr for AccountRecord {
    type Err = InvalidRecord;

    /// Parses a record. Lines with unknown names are left out: a later version may have more. A
    /// number that is missing is 0, except for the user and the start time.
    fn from_str(text: &str) -> Result<Self, InvalidRecord> {
        let (mut uid, mut start_ticks, mut usage) = (None, None, HostUse::default());
        for line in text.lines() {
            let (name, number) = line.split_once(' ').ok_or(InvalidRecord)?;
            let number: u64 = number.parse().map_err(|_| InvalidRecord)?;
            match name {
                "uid" => uid = Some(u32::try_from(number).map_err(|_| InvalidRecord)?),
                "start_ticks" => start_ticks = Some(number),
                _ => {
                    let field = HostUse::FIELDS.iter().find(|(known, _)| *known == name);
                    if let Some((_, field)) = field {
                        *field(&mut usage) = number;
                    }
                }
            }
        }
        Ok(Self {
            uid: uid.ok_or(InvalidRecord)?,
            start_ticks: start_ticks.ok_or(InvalidRecord)?,
            usage,
        })
    }
}

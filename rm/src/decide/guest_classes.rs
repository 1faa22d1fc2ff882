//! The guests on hosts that accept no guests, grouped into classes. All guests of a class have the
//! same possible targets. When many owners return at once, one search therefore serves the whole
//! class.

use super::{HostView, LeaveTime, OwnerState, TaskView};
use sempa_proto::load::FREE_BYTES_PER_TASK_MIN;
use sempa_proto::{HostId, Tid};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// Properties that determine the possible targets of a guest.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct GuestClass {
    arch: Box<str>,
    user: u32,
    program: Arc<str>,
    /// Base-2 logarithm of the guest's memory in bytes, rounded down. `None` if the guest needs no
    /// more than the memory that is reserved for every task. The memory matters because a host may
    /// have room only for a small guest.
    memory_log2: Option<u32>,
}

/// A guest that is not migrating.
#[derive(Clone, Copy, Debug)]
pub(super) struct Guest {
    pub(super) tid: Tid,
    /// Index of the guest's class.
    pub(super) class_index: usize,
    /// True if only the class determines the decision: the guest must leave immediately, it can
    /// migrate, and no host has refused it.
    pub(super) class_decides: bool,
}

/// The guests of all hosts that accept no guests.
#[derive(Clone, Debug, Default)]
pub(super) struct EvictableGuests {
    /// The guests, by host and position in the host's task list.
    guests: BTreeMap<(HostId, usize), Guest>,
    class_indices: HashMap<GuestClass, usize>,
    /// Classes with the number of their guests, by class index; `None` for an index that is not in
    /// use.
    classes: Vec<Option<(GuestClass, usize)>>,
    /// Class indices that are not in use.
    free_indices: Vec<usize>,
}

impl EvictableGuests {
    /// Returns the guests as (host, position in the host's task list, guest), in ascending order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (HostId, usize, Guest)> {
        self.guests
            .iter()
            .map(|((host, task_position), guest)| (*host, *task_position, *guest))
    }

    /// Returns a number that is greater than every class index.
    pub(super) fn class_index_end(&self) -> usize {
        self.classes.len()
    }

    /// Adds the guests of a host that accepts no guests. The host must not have been added already.
    pub(super) fn insert_host(&mut self, host: &HostView) {
        let leave_now = matches!(host.owner, OwnerState::Drained { .. })
            || host.guest_policy.leave_time == LeaveTime::Now;
        for (task_position, task) in host
            .tasks
            .iter()
            .enumerate()
            .filter(|(_, task)| task.is_evictable())
        {
            let only_class_matters =
                leave_now && task.migration_obstacle.is_none() && task.target_obstacles.is_empty();
            let guest_class_index = self.add_to_class(host, task);
            self.guests.insert(
                (host.id, task_position),
                Guest {
                    tid: task.tid,
                    class_index: guest_class_index,
                    class_decides: only_class_matters,
                },
            );
        }
    }

    /// Adds one guest to the count of the task's class. Returns the index of the class.
    fn add_to_class(&mut self, host: &HostView, task: &TaskView) -> usize {
        let memory_log2_value =
            (task.memory_bytes > FREE_BYTES_PER_TASK_MIN).then(|| task.memory_bytes.ilog2());
        let (user, program) = (task.user, task.name.clone());
        let class = GuestClass {
            arch: host.arch.as_str().into(),
            user,
            program,
            memory_log2: memory_log2_value,
        };
        if let Some(index) = self.class_indices.get(&class) {
            self.classes[*index]
                .as_mut()
                .expect("a kind has its number as long as there are guests of it")
                .1 += 1;
            return *index;
        }
        let index = self.free_indices.pop().unwrap_or(self.classes.len());
        if index == self.classes.len() {
            self.classes.push(None);
        }
        self.classes[index] = Some((class.clone(), 1));
        self.class_indices.insert(class, index);
        index
    }

    /// Removes the guests of a host.
    pub(super) fn remove_host(&mut self, host: HostId) {
        while let Some((key, guest)) = self
            .guests
            .range((host, 0)..=(host, usize::MAX))
            .next()
            .map(|(k, g)| (*k, *g))
        {
            self.guests.remove(&key);
            self.remove_from_class(guest.class_index);
        }
    }

    fn remove_from_class(&mut self, index: usize) {
        let (class, guest_count) = self.classes[index]
            .as_mut()
            .expect("there was a guest of this kind");
        *guest_count -= 1;
        if *guest_count == 0 {
            self.class_indices.remove(class);
            self.classes[index] = None;
            self.free_indices.push(index);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::GuestPolicy;
    use sempa_proto::Micros;

    fn host(index: u16, programs: &[&str]) -> HostView {
        let id = HostId::new(index).expect("a host");
        let tid = |n| Tid::for_task(id, n).expect("a task");
        let task = |(n, name): (usize, &&str)| TaskView {
            name: Arc::from(*name),
            ..TaskView::new(tid(n as u32 + 1), Micros(0))
        };
        HostView {
            id,
            name: format!("h{index}"),
            arch: "LINUX64".into(),
            zone: 0,
            labels: Arc::default(),
            speed: 1000,
            cores: 1,
            sample: None,
            external_mean: None,
            owner: OwnerState::Present {
                why: "at the keyboard".into(),
            },
            promised_bytes: 0,
            guest_policy: GuestPolicy::default(),
            migration_obstacle: None,
            starting_task_count: 0,
            tasks: programs.iter().enumerate().map(task).collect(),
        }
    }

    /// Guests of one class share its index. When a class has no more guests, the next new class
    /// reuses its index.
    #[test]
    fn empty_guest_class_frees_its_index() {
        let (mut guests, names) = (EvictableGuests::default(), ["a", "b", "a"]);
        guests.insert_host(&host(1, &names));
        guests.insert_host(&host(2, &["b"]));
        let class_indices_of = |guests: &EvictableGuests| {
            guests
                .iter()
                .map(|(.., guest)| guest.class_index)
                .collect::<Vec<_>>()
        };
        assert_eq!(
            (class_indices_of(&guests), guests.class_index_end()),
            (vec![0, 1, 0, 1], 2)
        );
        guests.remove_host(HostId::new(1).expect("a host"));
        assert_eq!(class_indices_of(&guests), [1]);
        guests.insert_host(&host(3, &["c", "d", "b"]));
        assert_eq!(
            (class_indices_of(&guests), guests.class_index_end()),
            (vec![1, 0, 2, 1], 3)
        );
        (2..4).for_each(|index| guests.remove_host(HostId::new(index).expect("a host")));
        assert!(
            guests.guests.is_empty()
                && guests.class_indices.is_empty()
                && guests.classes.iter().all(Option::is_none)
        );
    }
}

//! The guests on hosts that accept no guests, grouped into classes. The same targets are possible
//! for all guests of a class, so one search serves the whole class when many owners return at once.

use super::{HostView, Leaving, Owner, TaskView};
use sempa_proto::load::HEADROOM_BYTES_PER_TASK;
use sempa_proto::{HostId, Tid};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// Properties that determine the possible targets of a guest.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Kind {
    arch: Box<str>,
    user: u32,
    program: Arc<str>,
    /// Base-2 logarithm of the guest's memory in bytes, rounded down, because a host may have room
    /// for a small guest only. `None` if the guest needs no more than the memory reserved for every
    /// task.
    size: Option<u32>,
}

/// A guest that is not migrating.
#[derive(Clone, Copy, Debug)]
pub(super) struct Guest {
    pub(super) tid: Tid,
    /// Index of the guest's class.
    pub(super) kind: usize,
    /// True if only the class determines the decision: the guest must leave immediately, and no
    /// host has refused it.
    pub(super) is_plain: bool,
}

/// The guests of all hosts that accept no guests.
#[derive(Clone, Debug, Default)]
pub(super) struct Guests {
    /// The guests, by host and position in the host's task list.
    all: BTreeMap<(HostId, usize), Guest>,
    numbers: HashMap<Kind, usize>,
    /// Classes with the number of their guests, by class index.
    kinds: Vec<Option<(Kind, usize)>>,
    /// Class indices that are not in use.
    free: Vec<usize>,
}

impl Guests {
    /// Returns the guests as (host, position in the host's task list, guest), in ascending order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (HostId, usize, Guest)> {
        self.all
            .iter()
            .map(|((host, at), guest)| (*host, *at, *guest))
    }

    /// Returns a number that is greater than every class index.
    pub(super) fn kinds(&self) -> usize {
        self.kinds.len()
    }

    /// Adds the guests of a host that accepts no guests. The host must not have been added already.
    pub(super) fn learn(&mut self, host: &HostView) {
        let leave_now =
            matches!(host.owner, Owner::Drained { .. }) || host.terms.leaving == Leaving::Now;
        for (at, task) in host
            .tasks
            .iter()
            .enumerate()
            .filter(|(_, task)| task.is_settled_guest())
        {
            let is_plain = leave_now && task.held.is_none() && task.refused.is_empty();
            let kind = self.number(host, task);
            self.all.insert(
                (host.id, at),
                Guest {
                    tid: task.tid,
                    kind,
                    is_plain,
                },
            );
        }
    }

    /// Counts one more guest of the task's class. Returns the index of the class.
    fn number(&mut self, host: &HostView, task: &TaskView) -> usize {
        let size = (task.bytes > HEADROOM_BYTES_PER_TASK).then(|| task.bytes.ilog2());
        let (user, program) = (task.user, task.name.clone());
        let kind = Kind {
            arch: host.arch.as_str().into(),
            user,
            program,
            size,
        };
        if let Some(number) = self.numbers.get(&kind) {
            self.kinds[*number]
                .as_mut()
                .expect("a kind has its number as long as there are guests of it")
                .1 += 1;
            return *number;
        }
        let number = self.free.pop().unwrap_or(self.kinds.len());
        if number == self.kinds.len() {
            self.kinds.push(None);
        }
        self.kinds[number] = Some((kind.clone(), 1));
        self.numbers.insert(kind, number);
        number
    }

    /// Removes the guests of a host.
    pub(super) fn forget(&mut self, host: HostId) {
        while let Some((key, guest)) = self
            .all
            .range((host, 0)..=(host, usize::MAX))
            .next()
            .map(|(k, g)| (*k, *g))
        {
            self.all.remove(&key);
            self.leaves(guest.kind);
        }
    }

    fn leaves(&mut self, number: usize) {
        let (kind, guests) = self.kinds[number]
            .as_mut()
            .expect("there was a guest of this kind");
        *guests -= 1;
        if *guests == 0 {
            self.numbers.remove(kind);
            self.kinds[number] = None;
            self.free.push(number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::Terms;
    use sempa_proto::Micros;

    fn host(index: u16, programs: &[&str]) -> HostView {
        let id = HostId::new(index).expect("a host");
        let tid = |n| Tid::task(id, n).expect("a task");
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
            foreign_mean: None,
            owner: Owner::Present {
                why: "at the keyboard".into(),
            },
            promised: 0,
            terms: Terms::default(),
            no_moves: None,
            starting: 0,
            tasks: programs.iter().enumerate().map(task).collect(),
        }
    }

    /// Guests of one class share its index. When a class has no more guests, the next new class
    /// reuses its index.
    #[test]
    fn empty_guest_class_frees_its_index() {
        let (mut guests, names) = (Guests::default(), ["a", "b", "a"]);
        guests.learn(&host(1, &names));
        guests.learn(&host(2, &["b"]));
        let kinds = |guests: &Guests| {
            guests
                .iter()
                .map(|(.., guest)| guest.kind)
                .collect::<Vec<_>>()
        };
        assert_eq!((kinds(&guests), guests.kinds()), (vec![0, 1, 0, 1], 2));
        guests.forget(HostId::new(1).expect("a host"));
        assert_eq!(kinds(&guests), [1]);
        guests.learn(&host(3, &["c", "d", "b"]));
        assert_eq!((kinds(&guests), guests.kinds()), (vec![1, 0, 2, 1], 3));
        (2..4).for_each(|index| guests.forget(HostId::new(index).expect("a host")));
        assert!(
            guests.all.is_empty()
                && guests.numbers.is_empty()
                && guests.kinds.iter().all(Option::is_none)
        );
    }
}

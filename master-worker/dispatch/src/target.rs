//! Target numbers of workers, and the requests for new ones.

use crate::{ClassId, Micros, Settings};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Requests for the workers of one class.
#[derive(Debug, Default)]
struct ClassTarget {
    /// `None`: workers of this class come and go by themselves; none is requested or released.
    target: Option<u32>,
    /// Workers that were requested and have not reported.
    requested: u32,
    /// Workers that have reported and have not left, without those that are leaving.
    present: u32,
    /// Delay before the next request, after requests that failed.
    delay: Micros,
    next_request_at: Micros,
}

/// Numbers of workers of one class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClassStatus {
    pub target: Option<u32>,
    pub requested: u32,
    pub present: u32,
}

/// Target numbers of all classes.
#[derive(Debug, Default)]
pub(crate) struct Targets {
    classes: BTreeMap<ClassId, ClassTarget>,
}

impl Targets {
    /// Sets the number of workers that a class should have. The next request is made at
    /// `request_at`.
    pub(crate) fn set(&mut self, class: ClassId, target: u32, request_at: Micros) {
        let state = self.classes.entry(class).or_default();
        state.target = Some(target);
        (state.delay, state.next_request_at) = (0, request_at);
    }

    /// Counts a worker that reports. A worker that nobody requested takes the place of a requested
    /// one.
    pub(crate) fn add_present(&mut self, class: ClassId) {
        let state = self.classes.entry(class).or_default();
        state.present += 1;
        state.requested = state.requested.saturating_sub(1);
        state.delay = 0;
    }

    /// Counts a worker that has left or gets no further task.
    pub(crate) fn remove_present(&mut self, class: ClassId) {
        if let Some(state) = self.classes.get_mut(&class) {
            state.present = state.present.saturating_sub(1);
        }
    }

    /// Counts workers that could not be started; the next request is delayed.
    pub(crate) fn start_failed(
        &mut self,
        class: ClassId,
        count: u32,
        now: Micros,
        settings: &Settings,
    ) {
        let state = self.classes.entry(class).or_default();
        state.requested = state.requested.saturating_sub(count);
        let doubled = state.delay.saturating_mul(2).max(settings.request_delay);
        state.delay = doubled.min(settings.request_delay_max);
        state.next_request_at = now + state.delay;
    }

    /// Ends all delays: a host may have room now.
    pub(crate) fn end_delays(&mut self, now: Micros) {
        for state in self.classes.values_mut() {
            state.delay = 0;
            state.next_request_at = state.next_request_at.min(now);
        }
    }

    /// Returns the numbers of workers to start now, by class, and counts them as requested.
    pub(crate) fn take_requests(
        &mut self,
        now: Micros,
        settings: &Settings,
    ) -> Vec<(ClassId, u32)> {
        let mut requests = Vec::new();
        for (class, state) in &mut self.classes {
            if now < state.next_request_at {
                continue;
            }
            let count = state.missing_count(settings);
            if count > 0 {
                state.requested += count;
                requests.push((*class, count));
            }
        }
        requests
    }

    /// Returns the number of workers of each class above its target.
    pub(crate) fn surplus(&self) -> Vec<(ClassId, u32)> {
        let surplus = |(class, state): (&ClassId, &ClassTarget)| {
            let count = state.present.saturating_sub(state.target?);
            (count > 0).then_some((*class, count))
        };
        self.classes.iter().filter_map(surplus).collect()
    }

    /// Returns the time of the next delayed request.
    pub(crate) fn next_request_at(&self, settings: &Settings) -> Option<Micros> {
        let waiting = |state: &&ClassTarget| state.missing_count(settings) > 0;
        let times = self.classes.values().filter(waiting);
        times.map(|state| state.next_request_at).min()
    }

    pub(crate) fn status(&self) -> BTreeMap<ClassId, ClassStatus> {
        let status = |state: &ClassTarget| ClassStatus {
            target: state.target,
            requested: state.requested,
            present: state.present,
        };
        let classes = self.classes.iter();
        classes
            .map(|(class, state)| (*class, status(state)))
            .collect()
    }
}

impl ClassTarget {
    /// Returns the number of workers that may be requested now.
    fn missing_count(&self, settings: &Settings) -> u32 {
        let target = self.target.unwrap_or(0);
        let missing = target.saturating_sub(self.present + self.requested);
        let limit = settings
            .limits
            .starting_workers
            .saturating_sub(self.requested);
        missing.min(settings.request_step).min(limit)
    }
}

//! Init data of workers: sent once per host, then shared by all workers of the host.

use crate::protocol::InitSource;
use bytes::Bytes;
use sempa_work_dispatch::WorkerId;
use std::collections::BTreeMap;

/// Init data below this size are sent to each worker: a message costs less than a file.
const SHARED_BYTES_MIN: usize = 64 << 10;

/// State of the copy on one host.
#[derive(Debug)]
enum HostCopy {
    /// One worker receives the data and stores them; others wait for its report.
    Storing {
        by: WorkerId,
        waiting: Vec<WorkerId>,
    },
    Stored,
}

/// The init data and the hosts that have a copy.
#[derive(Debug)]
pub(crate) struct InitHosts {
    data: Bytes,
    /// Number under which workers store the data. Numbers of different data differ.
    number: u64,
    hosts: BTreeMap<String, HostCopy>,
    /// Bytes of init data in messages so far.
    sent_bytes: u64,
}

/// What a worker gets at present.
#[derive(Debug, PartialEq)]
pub(crate) enum InitOffer {
    Now(InitSource),
    /// Another worker of the host is receiving the data.
    Later,
}

impl InitHosts {
    pub(crate) fn new(data: Bytes, number: u64) -> Self {
        Self {
            data,
            number,
            hosts: BTreeMap::new(),
            sent_bytes: 0,
        }
    }

    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Replaces the data. No host has a copy of the new ones, and no worker waits for one.
    pub(crate) fn replace(&mut self, data: Bytes, number: u64) {
        (self.data, self.number) = (data, number);
        self.hosts.clear();
    }

    pub(crate) fn sent_bytes(&self) -> u64 {
        self.sent_bytes
    }

    fn in_message(&mut self, store_as: Option<u64>) -> InitSource {
        self.sent_bytes += self.data.len() as u64;
        InitSource::Message {
            data: self.data.clone(),
            store_as,
        }
    }

    /// Returns where a worker on `host` gets the init data.
    pub(crate) fn offer(&mut self, worker: WorkerId, host: &str) -> InitOffer {
        if self.data.len() < SHARED_BYTES_MIN {
            return InitOffer::Now(self.in_message(None));
        }
        match self.hosts.get_mut(host) {
            Some(HostCopy::Stored) => InitOffer::Now(InitSource::Host {
                stored_as: self.number,
                length: self.data.len() as u64,
            }),
            Some(HostCopy::Storing { by, waiting }) if *by != worker => {
                waiting.push(worker);
                InitOffer::Later
            }
            _ => {
                let copy = HostCopy::Storing {
                    by: worker,
                    waiting: Vec::new(),
                };
                self.hosts.insert(host.to_string(), copy);
                InitOffer::Now(self.in_message(Some(self.number)))
            }
        }
    }

    /// Handles the report of a worker that has the data. Returns the workers that waited for it.
    pub(crate) fn mark_stored(&mut self, worker: WorkerId, host: &str) -> Vec<WorkerId> {
        match self.hosts.get_mut(host) {
            Some(HostCopy::Storing { by, waiting }) if *by == worker => {
                let waiting = std::mem::take(waiting);
                self.hosts.insert(host.to_string(), HostCopy::Stored);
                waiting
            }
            _ => Vec::new(),
        }
    }

    /// Forgets the copy on a host: it cannot be read there.
    pub(crate) fn forget_copy(&mut self, host: &str) {
        if matches!(self.hosts.get(host), Some(HostCopy::Stored)) {
            self.hosts.remove(host);
        }
    }

    /// Handles the loss of a worker. Returns the workers that waited for its copy.
    pub(crate) fn forget_worker(&mut self, worker: WorkerId) -> Vec<WorkerId> {
        let mut abandoned = Vec::new();
        self.hosts.retain(|_, copy| match copy {
            HostCopy::Storing { by, waiting } if *by == worker => {
                abandoned.append(waiting);
                false
            }
            HostCopy::Storing { waiting, .. } => {
                waiting.retain(|waiting| *waiting != worker);
                true
            }
            HostCopy::Stored => true,
        });
        abandoned
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn large() -> InitHosts {
        InitHosts::new(Bytes::from(vec![7; SHARED_BYTES_MIN]), 5)
    }

    fn is_message(offer: &InitOffer) -> bool {
        matches!(
            offer,
            InitOffer::Now(InitSource::Message {
                store_as: Some(5),
                ..
            })
        )
    }

    #[test]
    fn each_host_gets_large_data_once() {
        let mut hosts = large();
        assert!(is_message(&hosts.offer(WorkerId(1), "a")));
        assert_eq!(hosts.offer(WorkerId(2), "a"), InitOffer::Later);
        assert!(is_message(&hosts.offer(WorkerId(3), "b")));
        assert_eq!(hosts.mark_stored(WorkerId(1), "a"), [WorkerId(2)]);
        let offer = hosts.offer(WorkerId(2), "a");
        assert!(matches!(
            offer,
            InitOffer::Now(InitSource::Host { stored_as: 5, .. })
        ));
        assert_eq!(hosts.sent_bytes(), 2 * SHARED_BYTES_MIN as u64);
    }

    #[test]
    fn loss_of_the_storing_worker_frees_the_others() {
        let mut hosts = large();
        hosts.offer(WorkerId(1), "a");
        hosts.offer(WorkerId(2), "a");
        assert_eq!(hosts.forget_worker(WorkerId(1)), [WorkerId(2)]);
        assert!(is_message(&hosts.offer(WorkerId(2), "a")));
        hosts.mark_stored(WorkerId(2), "a");
        hosts.forget_copy("a");
        assert!(
            is_message(&hosts.offer(WorkerId(4), "a")),
            "the copy is lost"
        );
    }

    #[test]
    fn small_data_go_to_each_worker() {
        let mut hosts = InitHosts::new(Bytes::from_static(b"x"), 5);
        for worker in 1..=3 {
            let offer = hosts.offer(WorkerId(worker), "a");
            assert!(matches!(
                offer,
                InitOffer::Now(InitSource::Message { store_as: None, .. })
            ));
        }
        assert_eq!(hosts.sent_bytes(), 3);
    }
}

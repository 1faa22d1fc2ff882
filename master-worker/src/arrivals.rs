//! Workers that come: their welcome, and init data that change while the run goes on.

use crate::init_hosts::InitOffer;
use crate::master::{Master, RunError, RunState, Transport};
use crate::protocol::{Hello, InitSource, PROTOCOL_VERSION, ToWorker, Welcome};
use crate::raw::{PoolEvent, RawDriver};
use bytes::Bytes;
use sempa_work_dispatch::{Event, Groups, WorkerId};

/// A worker that has no init data, or old ones.
#[derive(Debug)]
pub(crate) struct WaitingWorker {
    pub(crate) host: String,
    /// The worker has had no init data of this run.
    is_new: bool,
}

/// Returns the number of init data. Numbers of different data differ, also after a restart of the
/// master.
pub(crate) fn init_number(run: u64, data: &[u8]) -> u64 {
    let hash = *blake3::hash(data).as_bytes();
    let first = [
        hash[0], hash[1], hash[2], hash[3], hash[4], hash[5], hash[6], hash[7],
    ];
    run ^ u64::from_le_bytes(first)
}

impl<D: RawDriver> Master<D> {
    /// True if the worker has init data of this run.
    pub(crate) fn is_member(&self, worker: WorkerId) -> bool {
        let is_new = self.waiting_workers.get(&worker).is_some_and(|w| w.is_new);
        self.run.dispatcher.has_worker(worker) && !is_new
    }

    /// Welcomes a worker: a new one, or one that an earlier master of this run has left.
    pub(crate) fn greet(
        &mut self,
        worker: WorkerId,
        hello: Hello,
        transport: &mut dyn Transport,
    ) -> Result<(), RunError> {
        if hello.protocol != PROTOCOL_VERSION {
            let why = format!(
                "the worker speaks version {} of the protocol and the master version \
                 {PROTOCOL_VERSION}: compile both with the same version of Sempa",
                hello.protocol
            );
            transport.send(worker, &ToWorker::Refused { why });
            return Ok(());
        }
        if self.state != RunState::Running {
            transport.send(worker, &ToWorker::End { run_is_over: true });
            return Ok(());
        }
        if hello.run == Some(self.run_number) {
            return self.greet_returned(worker, hello, transport);
        }
        let started = Event::WorkerStarted {
            worker,
            class: hello.class,
            groups: hello.groups,
            host: hello.host.as_str().into(),
        };
        let waiting = WaitingWorker {
            host: hello.host,
            is_new: true,
        };
        self.waiting_workers.insert(worker, waiting);
        self.tell_dispatcher(started, transport)?;
        self.welcome(worker, transport);
        Ok(())
    }

    fn greet_returned(
        &mut self,
        worker: WorkerId,
        hello: Hello,
        transport: &mut dyn Transport,
    ) -> Result<(), RunError> {
        let welcome = self.welcome_message(None);
        transport.send(worker, &ToWorker::Welcome(Box::new(welcome)));
        if hello.init != Some(self.init.number()) {
            transport.send(worker, &ToWorker::InitChanged);
        }
        let returned = Event::WorkerReturned {
            worker,
            class: hello.class,
            groups: hello.groups,
            host: hello.host.as_str().into(),
            benchmark: hello.benchmark_us,
            held_attempts: hello.held_attempts,
        };
        self.tell_dispatcher(returned, transport)?;
        self.report_pool_event(PoolEvent::WorkerReady {
            worker,
            host: hello.host.into(),
        });
        Ok(())
    }

    fn welcome_message(&self, init: Option<InitSource>) -> Welcome {
        Welcome {
            run: self.run_number,
            run_name: self.run_name.clone(),
            init_number: self.init.number(),
            init,
            benchmark: self.benchmark.clone(),
            update: self.run.update.clone(),
            keeps_results: self.journal.is_some(),
            master_wait_ms: u64::try_from(self.master_wait.as_millis()).unwrap_or(u64::MAX),
        }
    }

    /// Sends the welcome to a worker, unless another worker of its host is receiving the init data.
    pub(crate) fn welcome(&mut self, worker: WorkerId, transport: &mut dyn Transport) {
        let Some(waiting) = self.waiting_workers.get(&worker) else {
            return;
        };
        if let InitOffer::Now(source) = self.init.offer(worker, &waiting.host) {
            let welcome = self.welcome_message(Some(source));
            transport.send(worker, &ToWorker::Welcome(Box::new(welcome)));
        }
    }

    /// Sends the newest init data to a worker that wants them, or as soon as its host has a copy.
    pub(crate) fn send_new_init(&mut self, worker: WorkerId, transport: &mut dyn Transport) {
        let Some(host) = self.run.dispatcher.worker_host(worker) else {
            return;
        };
        let waiting = WaitingWorker {
            host: host.to_string(),
            is_new: false,
        };
        self.waiting_workers.entry(worker).or_insert(waiting);
        self.welcome(worker, transport);
    }

    /// Handles a worker that has the init data of a number.
    pub(crate) fn mark_ready(
        &mut self,
        worker: WorkerId,
        init: u64,
        benchmark_us: Option<u64>,
        transport: &mut dyn Transport,
    ) -> Result<(), RunError> {
        // The worker gets newer data, and reports again.
        if init != self.init.number() {
            return Ok(());
        }
        let Some(waiting) = self.waiting_workers.remove(&worker) else {
            return Ok(());
        };
        for other in self.init.mark_stored(worker, &waiting.host) {
            self.welcome(other, transport);
        }
        if !waiting.is_new {
            return Ok(());
        }
        let ready = Event::WorkerReady {
            worker,
            benchmark: benchmark_us,
        };
        self.tell_dispatcher(ready, transport)?;
        self.report_pool_event(PoolEvent::WorkerReady {
            worker,
            host: waiting.host.into(),
        });
        Ok(())
    }

    /// Replaces the init data. Present workers of `groups` get the new data before their next task.
    pub(crate) fn refresh_init_data(
        &mut self,
        data: Bytes,
        groups: Option<Groups>,
        transport: &mut dyn Transport,
    ) {
        let number = init_number(self.run_number, &data);
        if number != self.init.number() {
            self.init.replace(data, number);
            let waiting_workers: Vec<WorkerId> = self.waiting_workers.keys().copied().collect();
            for worker in waiting_workers {
                self.welcome(worker, transport);
            }
        }
        let Some(groups) = groups else {
            return;
        };
        for worker in self.run.dispatcher.initialized_workers(groups) {
            if !self.waiting_workers.contains_key(&worker) {
                transport.send(worker, &ToWorker::InitChanged);
            }
        }
    }
}

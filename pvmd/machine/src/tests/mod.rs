//! Tests on whole virtual machines that run in one process and are determined by a seed.

mod checkpoints;
mod engines;
mod faults;
mod group_members;
mod guests;
mod hosts;
mod moving;
mod parting;
mod routes;
mod scene;
mod servers;
mod sim;
mod speaker;
mod step_matrix;
mod survey;
mod suspend;
mod tasks;

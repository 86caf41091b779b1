//! Nodes at their jobs, in this process: connections that are lost and come back, several cores, small devices.

mod cores;
mod depth;
mod redial;
mod scene;

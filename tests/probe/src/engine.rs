//! Engine and device together: the poller over the software device, from the first order to the last.

use core::sync::atomic::AtomicU64;
use o2poll_dataplane::nic::{
    Burst, Completion, Fault, Nic, Qp, ReceiveQueue, Rejected, SendWr, Sge, WrId,
};
use o2poll_dataplane::peer::{self, table};
use o2poll_dataplane::poller::Poller;
use o2poll_dataplane::transfer;
use o2poll_dataplane::wire::ping::PingInfo;
use o2poll_dataplane::wire::{Message, RejectRecord, encode_immediate};

use o2poll_dataplane::ring::{Indices, Slot};
use o2poll_soft::{
    Chunk, Lossy, Passed, Ports, Reader, Recorder, Soft, Tap, Timer, Window, link, loopback,
    recorder,
};

type Device = Soft<'static, Ports<'static, 'static>>;
type Weathered = Soft<'static, Lossy<Ports<'static, 'static>>>;
type Tapped = Soft<'static, Tap<'static, Ports<'static, 'static>, Stopped>>;
type Core = Poller<'static, Device>;

/// A clock for a tap.
pub struct Stopped(u64);

impl Timer for Stopped {
    fn now(&self) -> u64 {
        self.0
    }
}

/// Keeps the engine, its device and what the control side of a core calls.
pub fn keep() {
    crate::rooms::keep_all![
        Core::new,
        Core::poll,
        Core::leftovers,
        Poller::<'static, Weathered>::poll,
        Poller::<'static, Tapped>::poll,
        record,
        read,
        Device::new,
        Device::register,
        Device::gauges,
        <Device as Nic>::adopt,
        <Device as Nic>::fail,
        <Device as Nic>::retire,
        <Device as Nic>::adopt_window,
        <Device as Nic>::retire_window,
        <Device as Nic>::arm,
        queue,
        doorbell,
        receive,
        poll,
        Lossy::<Ports<'static, 'static>>::new,
        Lossy::<Ports<'static, 'static>>::set_weather,
        link,
        loopback,
        Window::new,
        decode,
        Message::encode,
        Message::encode_as,
        encode_immediate,
        RejectRecord::decode,
        RejectRecord::encode,
        PingInfo::decode,
        peer::request,
        peer::accepted,
        peer::rejected,
        answer,
        table::step,
        transfer::step,
    ];
}

fn queue(device: &mut Device, qp: Qp, id: WrId, signalled: bool, wr: &SendWr<'_>) {
    device.queue(qp, id, signalled, *wr);
}

fn doorbell(device: &mut Device, qp: Qp) -> Result<(), Rejected> {
    device.doorbell(qp)
}

fn receive(device: &mut Device, into: ReceiveQueue, id: WrId, buffer: Sge) -> Result<(), Rejected> {
    device.receive(into, id, buffer)
}

fn poll(device: &mut Device, out: &mut Burst) -> Result<Option<Completion>, Fault> {
    device.poll(out)?;
    Ok(out.first().copied())
}

fn record<'t>(
    indices: &'t mut Indices,
    slots: &'t mut [Slot<Chunk>],
    order: &'t AtomicU64,
) -> Option<(Recorder<'t, Stopped>, Reader<'t>)> {
    recorder(indices, slots, order, Stopped(0))
}

fn read(reader: &mut Reader<'_>) -> (Option<Passed>, usize) {
    let mut length = 0_usize;
    let passed = reader.next(|bytes| length = length.wrapping_add(bytes.len()));
    (passed, length)
}

fn decode(bytes: &[u8]) -> bool {
    Message::decode(bytes).is_ok()
}

fn answer(
    private_data: &[u8],
    port: Option<u16>,
    local: &peer::Local,
    remembered: &mut peer::Remembered,
) -> peer::Answer {
    peer::answer(private_data, port, local, |_| Some(remembered))
}

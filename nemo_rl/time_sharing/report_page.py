"""The page that `report` fills: markup, style and the script that draws. It knows the data's keys and nothing of where they come from."""

from __future__ import annotations

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>time-sharing report</title>
<style>
 body{font:14px/1.45 system-ui,sans-serif;color:#1b1f24;background:#fff;margin:24px auto;max-width:1180px;padding:0 16px}
 h1{font-size:22px;margin:0 0 4px} h2{font-size:16px;margin:26px 0 6px} .sub{color:#57606a;margin:0 0 14px}
 canvas{width:100%;display:block;border:1px solid #d0d7de;border-radius:4px}
 table{border-collapse:collapse;font-variant-numeric:tabular-nums} td,th{padding:3px 12px 3px 0;text-align:right} td:first-child,th:first-child{text-align:left}
 th{color:#57606a;font-weight:500;border-bottom:1px solid #d0d7de} .chip{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:6px;vertical-align:-1px}
 .legend span{margin-right:16px;white-space:nowrap} .ok{color:#116329} .bad{color:#b31d28} #tip{position:fixed;background:#1b1f24;color:#fff;padding:4px 8px;border-radius:4px;
 font-size:12px;pointer-events:none;display:none;max-width:420px} ul{margin:4px 0;padding-left:18px} .hint{color:#57606a;font-size:12px;margin:4px 0}
 #checks ul{list-style:none;padding-left:0}
</style></head><body>
<h1 id="title"></h1><p class="sub" id="sub"></p>
<h2>GPUs over time</h2><p class="legend" id="legend"></p><canvas id="gpus"></canvas>
<p class="hint">Drag to zoom, double-click to reset.</p>
<h2>Generation demand (samples still to be generated)</h2><canvas id="demand"></canvas>
<h2>GPUs held</h2><canvas id="share"></canvas>
<h2>Hand-overs: claim to use, seconds</h2><canvas id="hand"></canvas>
<h2>Pipelines</h2><table id="table"></table>
<h2>Checked invariants</h2><div id="checks"></div>
<div id="tip"></div>
<script>
const D=/*DATA*/null, $=id=>document.getElementById(id), N=D.pipelines.length;
const hue=i=>(i*137.5+210)%360, color=(i,k)=>k==="generate"?`hsl(${hue(i)} 62% 58%)`:k==="train"?`hsl(${hue(i)} 60% 34%)`:k==="init"?`hsl(${hue(i)} 18% 46%)`:`hsl(${hue(i)} 60% 86%)`;
let view=[0,D.end||1];
const pad={l:54,r:26,t:8,b:22};
function setup(id,h){const c=$(id),r=window.devicePixelRatio||1,w=c.clientWidth||1100;c.width=w*r;c.height=h*r;c.style.height=h+"px";const g=c.getContext("2d");g.scale(r,r);
 g.clearRect(0,0,w,h);g.font="11px system-ui,sans-serif";return [g,w,h]}
const X=(t,w)=>pad.l+(t-view[0])/(view[1]-view[0])*(w-pad.l-pad.r);
function nice(x){const p=10**Math.floor(Math.log10(x||1));for(const m of [1,2,5,10])if(m*p>=x)return m*p;return 10*p}
function axis(g,w,h){g.fillStyle="#57606a";g.strokeStyle="#eaeef2";g.textAlign="center";const s=nice((view[1]-view[0])/9);
 for(let t=Math.ceil(view[0]/s)*s;t<=view[1];t+=s){const x=X(t,w);g.beginPath();g.moveTo(x,pad.t);g.lineTo(x,h-pad.b);g.stroke();g.fillText((s<1?t.toFixed(1):t.toFixed(0))+" s",x,h-8)}}
function drawGpus(){const row=D.gpus<=4?46:D.gpus<=16?26:D.gpus<=64?12:D.gpus<=256?4:Math.max(1,900/D.gpus),H=pad.t+pad.b+row*D.gpus,[g,w,h]=setup("gpus",H);axis(g,w,h);
 for(const [a,b,s,e,p,k] of D.bars){if(e<view[0]||s>view[1])continue;const x=Math.max(X(s,w),pad.l),y=pad.t+a*row,ww=Math.max(Math.min(X(e,w),w-pad.r)-x,0.6),hh=(b-a+1)*row-(row>3?1:0);
  g.fillStyle=color(p,k);g.fillRect(x,y,ww,hh);
  if(k==="train"&&row>6){g.save();g.beginPath();g.rect(x,y,ww,hh);g.clip();g.strokeStyle="rgba(255,255,255,.22)";for(let q=x-hh;q<x+ww;q+=7){g.beginPath();g.moveTo(q,y+hh);g.lineTo(q+hh,y);g.stroke()}g.restore()}
  if(row>10&&ww>46){g.fillStyle=k==="handover"?"#444":"#fff";g.textAlign="left";g.save();g.beginPath();g.rect(x,y,ww-2,hh);g.clip();g.fillText(k==="train"?(ww>g.measureText(D.pipelines[p]+" trains").width+8?D.pipelines[p]+" trains":""):k==="init"?"init":D.pipelines[p],x+4,y+Math.min(row,hh)/2+4);g.restore()}}
 g.fillStyle="#57606a";g.textAlign="right";const every=Math.ceil(14/row);for(let i=0;i<D.gpus;i+=every)g.fillText("GPU "+i,pad.l-6,pad.t+i*row+Math.min(row/2+4,12));
 for(const [t,text] of D.marks){if(!text.startsWith("Sched")||t>0){const x=X(t,w);if(x>pad.l){g.strokeStyle="#d1242f";g.beginPath();g.moveTo(x,pad.t);g.lineTo(x,pad.t+5);g.stroke()}}}
 $("gpus").row=row}
function drawCurves(id,curves){const [g,w,h]=setup(id,190);axis(g,w,h);let top=0;for(const c of curves)for(const p of c)top=Math.max(top,p[1]);top=nice(top||1);const Y=v=>h-pad.b-v/top*(h-pad.t-pad.b);
 g.fillStyle="#57606a";g.textAlign="right";for(const v of [0,top/2,top])g.fillText(v,pad.l-6,Y(v)+4);
 curves.forEach((c,i)=>{g.strokeStyle=`hsl(${hue(i)} 62% 45%)`;g.lineWidth=N>30?0.6:1.6;g.save();g.beginPath();g.rect(pad.l,0,w-pad.l-pad.r,h);g.clip();g.beginPath();let last=0;g.moveTo(X(0,w),Y(0));
  for(const [t,v] of c){g.lineTo(X(t,w),Y(last));g.lineTo(X(t,w),Y(v));last=v}g.lineTo(X(D.end,w),Y(last));g.stroke();g.restore()})}
function drawHand(){const [g,w,h]=setup("hand",150),v=D.handovers;if(!v.length){g.fillText("none",pad.l,30);return}
 const lo=Math.log10(Math.max(v[0],0.001)),hi=Math.log10(Math.max(v[v.length-1],0.01))+1e-9,B=60,bins=new Array(B).fill(0);
 for(const s of v)bins[Math.min(B-1,Math.floor((Math.log10(Math.max(s,0.001))-lo)/(hi-lo)*B))]++;const top=Math.max(...bins),bw=(w-pad.l-pad.r)/B;
 g.fillStyle="#6e7781";bins.forEach((n,i)=>g.fillRect(pad.l+i*bw,h-pad.b-n/top*(h-pad.t-pad.b),bw-1,n/top*(h-pad.t-pad.b)));
 g.textAlign="center";g.fillStyle="#57606a";for(const t of [0.001,0.01,0.1,1,10,100]){const x=pad.l+(Math.log10(t)-lo)/(hi-lo)*(w-pad.l-pad.r);if(x>=pad.l&&x<=w-pad.r)g.fillText(t+" s",x,h-8)}
 const q=p=>v[Math.min(v.length-1,Math.floor(p*v.length))];for(const [p,n] of [[.5,"p50"],[.99,"p99"]]){const x=pad.l+(Math.log10(Math.max(q(p),0.001))-lo)/(hi-lo)*(w-pad.l-pad.r);
  g.strokeStyle="#d1242f";g.beginPath();g.moveTo(x,pad.t);g.lineTo(x,h-pad.b);g.stroke();g.fillStyle="#d1242f";g.textAlign=x>w-120?"right":"left";g.fillText(` ${n} ${q(p).toFixed(2)} s `,x+3,pad.t+10)}
 g.textAlign="right";g.fillStyle="#57606a";g.fillText(top,pad.l-6,pad.t+8)}
function all(){drawGpus();drawCurves("demand",D.demand);drawCurves("share",D.share);drawHand()}
$("title").textContent=D.title;$("sub").textContent=`${N} pipelines, ${D.gpus} GPUs, ${D.end.toFixed(0)} s; GPUs held by a trainer or an active rank ${(100*D.busy).toFixed(0)} % of the time; ${D.handovers.length} hand-overs`;
const phase=(style,text)=>`<span><i class="chip" style="${style}"></i>${text}</span>`;
const phases=phase("background:hsl(0 0% 58%)","generating")+phase("background:repeating-linear-gradient(135deg,hsl(0 0% 26%) 0 3px,hsl(0 0% 45%) 3px 5px)","training")
 +phase("background:hsl(0 0% 46%)","first start")+phase("background:hsl(0 0% 86%)","handing over (drain, sleep, wake, sync)")+phase("background:#fff;box-shadow:inset 0 0 0 1px #d0d7de","idle");
$("legend").innerHTML=(N<=24?D.pipelines.map((n,i)=>`<span><i class="chip" style="background:${color(i,"generate")}"></i>${n}</span>`).join(""):`<span>${N} pipelines, one hue each</span>`)+"<br>"+phases;
$("table").innerHTML="<tr><th>pipeline</th><th>steps</th><th>GPU-seconds held</th></tr>"+D.pipelines.slice(0,60).map((n,i)=>`<tr><td><i class="chip" style="background:${color(i,"generate")}"></i>${n}</td><td>${D.steps[i]}</td><td>${D.gpuSeconds[i].toLocaleString("en")}</td></tr>`).join("");
$("checks").innerHTML=D.violations.length?`<p class="bad">${D.violations.length} violation(s), first ones:</p><ul>${D.violations.map(v=>`<li class="bad">${v}</li>`).join("")}</ul>`
 :`<p class="ok">No violation found.</p><ul>${Object.entries(D.invariants).map(([n,t])=>`<li>${n}. ${t}</li>`).join("")}</ul>`;
const G=$("gpus");let drag=null;const T=e=>{const r=G.getBoundingClientRect();return view[0]+(e.clientX-r.left-pad.l)/(r.width-pad.l-pad.r)*(view[1]-view[0])};
G.onmousedown=e=>{drag=T(e)};G.onmouseup=e=>{if(drag!==null){const t=T(e),a=Math.max(0,Math.min(t,drag)),b=Math.min(D.end,Math.max(t,drag));if(b-a>(view[1]-view[0])/100){view=[a,b];all()}}drag=null};
G.ondblclick=()=>{view=[0,D.end];all()};
G.onmousemove=e=>{const r=G.getBoundingClientRect(),t=T(e),gpu=Math.floor((e.clientY-r.top-pad.t)/G.row),hit=D.bars.find(b=>b[0]<=gpu&&gpu<=b[1]&&b[2]<=t&&t<=b[3]),tip=$("tip");
 if(hit){tip.style.display="block";tip.style.left=Math.min(e.clientX+12,innerWidth-320)+"px";tip.style.top=e.clientY+12+"px";tip.textContent=`GPU ${gpu}: ${hit[6]}, ${hit[2].toFixed(2)} to ${hit[3].toFixed(2)} s (${(hit[3]-hit[2]).toFixed(2)} s)`}else tip.style.display="none"};
G.onmouseleave=()=>{$("tip").style.display="none"};
onresize=all;all();
</script></body></html>
"""
